"""Conversations as the text that a model was trained on, for `data.text`.

Owns the way from a model's directory to a function of messages. Knows nothing of JSON Lines or tokens. The one
decision: the template is rendered by the code that serves, so a model is tuned on what it will be asked with.
"""

from pathlib import Path

from pipeline.data.json_lines import Messages, Render
from pipeline.serving.http.chat_template import TemplateRefusal, read_chat_template


def chat_renderer(place: Path) -> Render | None:
    """What makes one text of a conversation; None where the model has no chat template.

    Args:
        place: a model's directory, or its `tokenizer.json`.

    Raises:
        ArtifactError: the template cannot be read.
    """
    template = read_chat_template(place if place.is_dir() else place.parent)
    if template is None:
        return None

    def render(messages: Messages) -> str:
        try:
            # What follows the end of the last message is where the next one would begin.
            return template.render(messages, is_open=False).rstrip()
        except TemplateRefusal as error:
            raise ValueError(str(error)) from error

    return render
