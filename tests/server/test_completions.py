from __future__ import annotations

import openai
import pytest


@pytest.fixture
def client(server):
    return server.client()


def test_a_completion_and_its_stream_say_the_same(client):
    ask = {"model": "mock", "prompt": "hello", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True))
    assert whole.object == "text_completion"
    assert len(whole.choices[0].text) == 6
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 6
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_a_chat_and_its_stream_say_the_same(client):
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    ask = {"model": "mock", "messages": messages, "max_completion_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].message.content) == 5
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert deltas[0].content  # the first chunk comes with the first token, never before it


def test_usage_comes_last_once_and_without_choices(client):
    stream = client.completions.create(
        model="mock", prompt="a", max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 3)


def test_several_prompts_with_several_choices(client):
    answer = client.completions.create(
        model="mock", prompt=["one", [70, 71], "one"], n=2, seed=7, max_tokens=4
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert texts[:2] == texts[4:]  # a seed gives the same choices again
    assert texts[0] != texts[1]  # which differ among themselves
    assert answer.usage.completion_tokens == 24
    one = client.completions.create(model="mock", prompt="one", max_tokens=4)
    ids = client.completions.create(model="mock", prompt=[70, 71], max_tokens=4)
    prompt_tokens = 2 * one.usage.prompt_tokens + ids.usage.prompt_tokens
    assert answer.usage.prompt_tokens == prompt_tokens  # each prompt once, whatever n


def test_choices_of_a_stream_are_told_apart(client):
    ask = {"model": "mock", "prompt": ["x", "y"], "n": 2, "seed": 1, "max_tokens": 5}
    whole = client.completions.create(**ask)
    texts, ends = [""] * 4, [0] * 4
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [1] * 4


async def test_the_asynchronous_client_works_too(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
        )
        assert len([chunk async for chunk in stream]) == 3


def test_a_stop_string_across_tokens_never_shows(client):
    ask = {"model": "mock", "prompt": "stop me", "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**ask).choices[0].text
    stop = text[4:7]
    expected = text[: text.index(stop)]
    whole = client.completions.create(**ask, stop=stop).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    chunks = list(client.completions.create(**ask, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
