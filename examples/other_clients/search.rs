// The corrected search of docs/other-clients.md with the crate qdrant-client, by gRPC.

use qdrant_client::qdrant::{
    Expression, FormulaBuilder, PayloadExcludeSelector, PrefetchQueryBuilder, QueryPointsBuilder,
};

let key = "hub_offset.v1";
let found = client
    .query(
        QueryPointsBuilder::new("photos")
            .add_prefetch(PrefetchQueryBuilder::default().query(vector).limit(40u64))
            .query(
                FormulaBuilder::new(Expression::sum_with([
                    Expression::variable("$score"),
                    Expression::variable(key),
                ]))
                .add_default(key, 0.0),
            )
            .limit(10)
            .with_payload(PayloadExcludeSelector { fields: vec!["hub_offset".into()] }),
    )
    .await?;
