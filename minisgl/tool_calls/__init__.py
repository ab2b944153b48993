"""Tool calls: the call formats of model families, and incremental parsers. No code yet.

The seam is between the detokenizer and the response (server/response.py): a parser converts the
text of the output, as it arrives, to tool calls. Entry points (server/worker_main.py, LLM) register
this package; the core does not import it.
"""

__all__: list[str] = []
