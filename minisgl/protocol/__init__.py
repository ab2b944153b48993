"""Every JSON body of the HTTP API as a msgspec struct.

`requests` describes the bodies that clients send, `responses` the bodies that clients receive.

The structs are the only description of the API: `convert` validates requests with them, `response`
encodes answers with them, and the OpenAPI document and the tables of docs/api.md are generated from
their schemas. The descriptions of parameters are in protocol/parameters.toml.

Bounds that the command line sets (such as --max-messages) are not in the structs: `convert` checks
them and `openapi` adds them to the schemas.
"""

__all__: list[str] = []
