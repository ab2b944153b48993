"""The loop of the shell: a conversation and four commands. Ctrl-C stops only the answer."""

from collections.abc import Callable
from dataclasses import dataclass, field

from minisgl.shell.client import ChatClient, Message, ServerError
from minisgl.utils import near_names

COMMANDS = {
    "/help": "show this list",
    "/reset": "forget the conversation",
    "/history": "show the conversation",
    "/exit": "leave (or Ctrl-D)",
}


@dataclass(eq=False)
class Shell:
    """A conversation between a user and a served model.

    prompt: returns one line of the user; raises EOFError at the end of the input, and
    KeyboardInterrupt if the user discards the line.
    is_terminal: False for piped input. The output is then the answers only, and an error ends the
    shell.
    """

    client: ChatClient
    prompt: Callable[[str], str]
    is_terminal: bool = True
    _messages: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Read and answer lines until /exit or the end of the input.

        Raises ServerError if an answer to piped input fails.
        """
        if self.is_terminal:
            _say("Type a message; /help lists the commands, Ctrl-C stops an answer.")
        while True:
            try:
                line = self.prompt("> ").strip()
            except KeyboardInterrupt:
                _say("(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                return
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _command(self, line: str) -> bool:
        """Run one command. Returns False to end the shell."""
        name = line.split()[0]
        if name == "/exit":
            return False
        if name == "/reset":
            self._messages.clear()
            _say("(conversation forgotten)")
        elif name == "/history":
            for message in self._messages:
                _say(f"{message['role']}: {message['content']}")
        elif name == "/help":
            for command, description in COMMANDS.items():
                _say(f"{command:<10}{description}")
        else:
            _say(f"unknown command {name}{near_names(name, COMMANDS)} (/help lists the commands)")
        return True

    def _answer(self, line: str) -> None:
        """Stream one answer. The text before Ctrl-C stays part of the conversation."""
        self._messages.append({"role": "user", "content": line})
        parts: list[str] = []
        stream = self.client.stream(self._messages)
        try:
            for part in stream:
                parts.append(part)
                _say(part, end="")
            _say("")
        except KeyboardInterrupt:
            _say("\n(stopped)")
        except ServerError as error:
            if not self.is_terminal:
                raise
            _say(f"\nerror: {error}")
        finally:
            stream.close()
        if parts:
            self._messages.append({"role": "assistant", "content": "".join(parts)})
        else:
            self._messages.pop()


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)
