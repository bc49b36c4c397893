"""A tiny model that thinks between marks: its tokenizer has one token for each, in place of two that it needs not."""

from __future__ import annotations

from pathlib import Path

from tests import tiny

START, END = tiny.VOCAB - 3, tiny.VOCAB - 2
#: thinking has begun where the prompt ends, unless it is switched off
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>"
    "{% if enable_thinking is false %}</think>\n{% endif %}{% endif %}"
)
#: the model begins to think by itself
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}A: "
#: nobody thinks
PLAIN = BARE.replace("</think>", "---")


def make(arch: str, folder: Path, template: str = TEMPLATE) -> Path:
    tiny.make(arch, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace("<|endoftext|>", "<think>").replace("<|im_start|>", "</think>")
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(template)
    return folder
