"""Pure functions: requests and writes of a client, made into corrected ones. Nothing here sends anything."""
