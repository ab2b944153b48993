"""The APIs beside OpenAI's chat and completions: Responses and Messages.

Each module translates in both directions. Its `chat_body` makes the body of a chat from a body of
its API, and its writer makes the answers and events of its API from the output of the chat. All
other steps of a request are those of a chat.
"""
