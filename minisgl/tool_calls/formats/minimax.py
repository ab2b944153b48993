"""MiniMax-M2: <minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>..."""

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.formats.invoke import Invocations

_START, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_CALLS = Invocations(_END)

MINIMAX = Format(
    name="minimax",
    probe=_START,
    starts=(_START,),
    markers=(_START, _END),
    read=_CALLS.read,
    call=_CALLS.write_call,
    opening="\n",
    separator="\n",
    end=f"\n{_END}",
)
