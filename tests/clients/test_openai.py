"""The official openai package against the server. The model is tiny and says nonsense; what is tested is the form."""

import asyncio
import json
import time
import urllib.request
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

HI = [{"role": "user", "content": "hi"}]
# The model's format lets thoughts come first, and a random model has endless ones. This token begins them: never.
NO_THOUGHTS = {"27": -100}


def tool(name, properties):
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "a test",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }


TOOLS = [
    tool("add", {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": [1, 2, 3]}}),
    tool("now", {}),
]


def test_models(client):
    models = client.models.list().data
    assert [m.id for m in models] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert isinstance(answer.choices[0].message.content, str)
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, temperature=0)
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_stream(client):
    kwargs = dict(model="tiny", messages=HI, max_tokens=20, seed=3)
    whole = client.chat.completions.create(**kwargs).choices[0]
    text, ends, usage = "", [], None
    with client.chat.completions.create(
        **kwargs, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            if chunk.usage:
                assert chunk.choices == [] and usage is None
                usage = chunk.usage
                continue
            text += chunk.choices[0].delta.content or ""
            if chunk.choices[0].finish_reason:
                ends.append(chunk.choices[0].finish_reason)
    assert text == whole.message.content
    assert ends == [whole.finish_reason]
    assert usage.completion_tokens <= 20


def test_choices(client):
    answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=16, n=2, seed=1)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=5, seed=2, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.top_logprobs[2].logprob
    joined = b"".join(bytes(t.bytes) for t in content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=8)
    tame: bool


def test_schema_with_parse(client):
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="tiny", messages=HI, max_tokens=300, seed=seed, logit_bias=NO_THOUGHTS, response_format=Animal
        )
        animal = answer.choices[0].message.parsed
        assert isinstance(animal, Animal)
    for seed in range(50):
        body = {"seed": seed}
        answer = client.responses.parse(
            model="tiny", input="hi", text_format=Animal, max_output_tokens=300, extra_body=body
        )
        if answer.status == "completed":
            break
    assert isinstance(answer.output_parsed, Animal)


def test_stream_helper(client):
    with client.chat.completions.stream(
        model="tiny", messages=HI, max_tokens=300, seed=3, logit_bias=NO_THOUGHTS, response_format=Animal
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Animal)


def test_json_object(client):
    for seed in range(20):
        answer = client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=100,
            seed=seed,
            logit_bias=NO_THOUGHTS,
            response_format={"type": "json_object"},
        )
        text = answer.choices[0].message.content
        assert text.lstrip().startswith("{")
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def calls_of(message):
    return [(c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]


def test_tools_round_trip_with_two_calls(client):
    messages = list(HI)
    forced = dict(model="tiny", tools=TOOLS, tool_choice="required", max_tokens=400, logit_bias=NO_THOUGHTS)
    for seed in range(200):
        answer = client.chat.completions.create(messages=messages, seed=seed, **forced)
        choice = answer.choices[0]
        if choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 2:
            break
    else:
        pytest.fail("no seed gave two calls")
    calls = calls_of(choice.message)
    assert len({id for id, _, _ in calls}) == 2
    for _, name, arguments in calls:
        assert set(arguments) == ({"a", "b"} if name == "add" else set())
    # The same, streamed: the pieces put together are the same calls.
    joined = {}
    for chunk in client.chat.completions.create(messages=messages, seed=seed, stream=True, **forced):
        for call in chunk.choices[0].delta.tool_calls or []:
            entry = joined.setdefault(call.index, {"name": None, "arguments": ""})
            entry["name"] = call.function.name or entry["name"]
            entry["arguments"] += call.function.arguments or ""
    streamed = [(joined[i]["name"], json.loads(joined[i]["arguments"])) for i in sorted(joined)]
    assert streamed == [(name, arguments) for _, name, arguments in calls]
    # Their results go back.
    messages.append(choice.message)
    for id, _, _ in calls:
        messages.append({"role": "tool", "tool_call_id": id, "content": "3"})
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=8)
    assert answer.usage.prompt_tokens > 0


def test_named_tool(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "add"}},
        parallel_tool_calls=False,
        max_tokens=400,
        logit_bias=NO_THOUGHTS,
        seed=1,
    )
    assert [name for _, name, _ in calls_of(answer.choices[0].message)] == ["add"]


def test_completions(client):
    answer = client.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    assert [c.text[:3] for c in answer.choices] == ["one", "two"]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        assert "".join(choice.logprobs.tokens) == choice.text
    text = "".join(
        c.choices[0].text
        for c in client.completions.create(model="tiny", prompt="one", max_tokens=9, seed=4, stream=True)
    )
    assert text == client.completions.create(model="tiny", prompt="one", max_tokens=9, seed=4).choices[0].text


def test_responses(client):
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=8)
    assert answer.status in ("completed", "incomplete")
    assert isinstance(answer.output_text, str)
    kinds, final = [], None
    with client.responses.stream(model="tiny", input="hi", max_output_tokens=8) as stream:
        for event in stream:
            kinds.append(event.type)
        try:
            final = stream.get_final_response()
        except RuntimeError:
            # The package knows a final answer only where it is complete.
            assert kinds[-1] == "response.incomplete"
    assert kinds[0] == "response.created"
    assert final is None or final.output_text == "".join(final.output_text)


def test_embeddings(client):
    answer = client.embeddings.create(model="tiny", input=["hi", "hi", "ho"])
    vectors = [d.embedding for d in answer.data]
    assert vectors[0] == vectors[1] != vectors[2]
    assert abs(sum(v * v for v in vectors[0]) - 1) < 1e-4
    plain = client.embeddings.create(model="tiny", input="hi", encoding_format="float")
    assert max(abs(a - b) for a, b in zip(plain.data[0].embedding, vectors[0])) < 1e-6


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert raised.value.param == "temperature"
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=HI)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=HI, extra_body={"wizard": 1})
    assert "wizard" in raised.value.message
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="word " * 5000)
    assert raised.value.code == "context_length_exceeded"


def running(url):
    with urllib.request.urlopen(url + "/health", timeout=20) as response:
        model = json.load(response)["models"][0]
    return model["running"] + model["waiting"]


def wait_until_idle(url):
    deadline = time.monotonic() + 20
    while running(url):
        assert time.monotonic() < deadline, "a request that nobody waits for still runs"
        time.sleep(0.01)


def test_cancellation(client, url):
    stream = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=1900, stream=True, logit_bias={"5": 100}
    )
    next(iter(stream))
    stream.close()
    wait_until_idle(url)


def test_timeout_cancels(client, url):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(
            model="tiny", messages=HI, max_tokens=1900, logit_bias={"5": 100}
        )
    wait_until_idle(url)


def test_many_at_once(url):
    async def one(client, i):
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"number {i}"}], max_tokens=10, seed=i
        )
        return answer.choices[0].message.content

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(one(client, i) for i in range(32)))
            alone = [await one(client, i) for i in range(4)]
        assert together[:4] == alone

    asyncio.run(all_of_them())
