"""Tool calls: the call formats of model families, and incremental parsers. Nothing yet.

The seam is the text between the detokenizer and the response (server/response.py): a parser turns
parts of a text into parts of calls. Entry points (server/worker_main.py, LLM) register this
package; the core does not import it.
"""

__all__: list[str] = []
