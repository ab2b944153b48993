"""The APIs beside OpenAI's chat and completions: Responses and Messages.

The modules `*_request` make the body of a chat from a body of their API. The modules `*_answer`
write the output of the chat as answers and events of their API. All other steps of a request are
those of a chat.
"""

from minisgl.server.apis.translation import Translation

__all__ = ["Translation"]
