"""The APIs other than OpenAI's chat and completions: Responses and Messages.

The modules `*_request` translate a body of their API into the body of a chat. The modules
`*_answer` write the output of the chat as answers and events of their API. All other steps are the
same for a chat.
"""

__all__: list[str] = []
