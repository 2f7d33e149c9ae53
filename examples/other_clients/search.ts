// The corrected search of docs/other-clients.md with @qdrant/js-client-rest.

import { QdrantClient } from "@qdrant/js-client-rest";

const client = new QdrantClient({ url: "http://localhost:6333" });
const key = "hub_offset.v1";
const found = await client.query("photos", {
  prefetch: [{ query: vector, limit: 40 }],
  query: { formula: { sum: ["$score", key] }, defaults: { [key]: 0 } },
  limit: 10,
  with_payload: { exclude: ["hub_offset"] },
});
console.log(found.points);
