"""What the tests share: where the server is, and clients that never retry, so that a failure is seen."""

import os

import anthropic
import openai
import pytest

URL = os.environ["FORNAX_URL"]


@pytest.fixture
def url():
    return URL


@pytest.fixture
def client():
    with openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def claude():
    with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60) as client:
        yield client
