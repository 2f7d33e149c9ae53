// The corrected search of docs/other-clients.md with github.com/qdrant/go-client, by gRPC.

key := "hub_offset.v1"
found, err := client.Query(ctx, &qdrant.QueryPoints{
	CollectionName: "photos",
	Prefetch: []*qdrant.PrefetchQuery{{
		Query: qdrant.NewQueryDense(vector),
		Limit: qdrant.PtrOf(uint64(40)),
	}},
	Query: qdrant.NewQueryFormula(&qdrant.Formula{
		Expression: qdrant.NewExpressionSum(&qdrant.SumExpression{
			Sum: []*qdrant.Expression{
				qdrant.NewExpressionVariable("$score"),
				qdrant.NewExpressionVariable(key),
			},
		}),
		Defaults: qdrant.NewValueMap(map[string]any{key: 0.0}),
	}),
	Limit:       qdrant.PtrOf(uint64(10)),
	WithPayload: qdrant.NewWithPayloadExclude("hub_offset"),
})
