"""The official anthropic package against the server."""

import anthropic
import pytest

HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "name": "add",
        "description": "a test",
        "strict": True,
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]


def test_message(claude):
    answer = claude.messages.create(model="tiny", max_tokens=8, messages=HI, system="be brief")
    assert answer.role == "assistant"
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 8
    count = claude.messages.count_tokens(model="tiny", messages=HI, system="be brief")
    used = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert count.input_tokens == used


def test_stream(claude):
    with claude.messages.stream(model="tiny", max_tokens=12, messages=HI, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    whole = claude.messages.create(model="tiny", max_tokens=12, messages=HI, extra_body={"temperature": 0})
    assert whole.content[0].text == text
    assert whole.stop_reason == final.stop_reason


def test_tools_round_trip_with_two_calls(claude):
    for _ in range(300):
        answer = claude.messages.create(
            model="tiny", max_tokens=400, messages=HI, tools=TOOLS, tool_choice={"type": "any"}
        )
        uses = [b for b in answer.content if b.type == "tool_use"]
        if answer.stop_reason == "tool_use" and len(uses) == 2:
            break
    else:
        pytest.fail("no answer had two calls")
    for use in uses:
        assert set(use.input) == ({"a"} if use.name == "add" else set())
    results = [{"type": "tool_result", "tool_use_id": u.id, "content": "3"} for u in uses]
    messages = HI + [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    answer = claude.messages.create(model="tiny", max_tokens=4, messages=messages, tools=TOOLS)
    assert answer.usage.output_tokens <= 4
    with claude.messages.stream(
        model="tiny",
        max_tokens=400,
        messages=HI,
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    ) as stream:
        final = stream.get_final_message()
    assert [b.name for b in final.content if b.type == "tool_use"] == ["add"]


def test_errors(claude):
    with pytest.raises(anthropic.BadRequestError) as raised:
        claude.messages.create(model="tiny", max_tokens=4, messages=[{"role": "wizard", "content": "x"}])
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=4, messages=HI)
