// The corrected search of docs/other-clients.md with io.qdrant:client, by gRPC.

import static io.qdrant.client.ExpressionFactory.sum;
import static io.qdrant.client.ExpressionFactory.variable;
import static io.qdrant.client.QueryFactory.formula;
import static io.qdrant.client.QueryFactory.nearest;
import static io.qdrant.client.ValueFactory.value;
import static io.qdrant.client.WithPayloadSelectorFactory.exclude;

import io.qdrant.client.grpc.Points.*;
import java.util.List;

String key = "hub_offset.v1";
List<ScoredPoint> found = client.queryAsync(
    QueryPoints.newBuilder()
        .setCollectionName("photos")
        .addPrefetch(PrefetchQuery.newBuilder().setQuery(nearest(vector)).setLimit(40))
        .setQuery(formula(Formula.newBuilder()
            .setExpression(sum(SumExpression.newBuilder().addSum(variable("$score")).addSum(variable(key)).build()))
            .putDefaults(key, value(0.0))
            .build()))
        .setLimit(10)
        .setWithPayload(exclude(List.of("hub_offset")))
        .build()).get();
