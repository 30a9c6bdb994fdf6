"""Files beside the weights go with a model: tokenizer, chat templates and the like."""

from converters.source import COMPANION_FILES, BesideTheWeights


def test_chat_templates_go_with_a_model_by_every_name(tmp_path):
    class Beside(BesideTheWeights):
        directory = tmp_path

    carried = {
        "chat_template.jinja": b"default",
        "tokenizer_config.json": b'{"chat_template": "older"}',
        "special_tokens_map.json": b"{}",
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "additional_chat_templates/tool_use.jinja": b"tools",
        "additional_chat_templates/rag.jinja": b"documents",
    }
    for name, content in {**carried, "additional_chat_templates/notes.txt": b"", "README.md": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert Beside().companions() == carried
    assert "chat_template.jinja" in COMPANION_FILES
