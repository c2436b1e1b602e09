"""Chat templates: what they write, what of it counts, and what is refused."""

import re
import subprocess
import time

import pytest

from flower_app.tasks import chat_renderer, chat_template
from flower_app.tasks.chat_template import CHATML, ChatTemplate, RenderingFailed, own_template
from flower_app.tasks.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from helpers.chat_cases import MARKED, QWEN3, TALKS, TEMPLATES, chat_tokenizer, dated, own_chat, rendered_here

ASKED = [{"role": "user", "content": "Who?"}]
TALK = [*ASKED, {"role": "assistant", "content": "A dog."}]


@pytest.fixture
def here(monkeypatch):
    """Render in this process."""
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)


def shown(chat, talk=TALK, loss_on="assistant"):
    with chat.renderer() as render:
        return chat.counted(render, talk, loss_on).marked()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_librarys_apply_chat_template(tmp_path, name):
    chat, library = own_chat(tmp_path, name), chat_tokenizer(name)
    template = dated(TEMPLATES[name])
    with chat.renderer() as render:
        for talk in TALKS:
            expected = library.apply_chat_template(talk, chat_template=template)["input_ids"]
            counted = chat.counted(render, talk, "assistant")
            assert counted.ids == expected
            # The template's own mark of the beginning, and no second one.
            assert counted.ids.count(library.bos_token_id) <= 1 or name == "smollm2"
            prompt = library.apply_chat_template(talk[:-1], chat_template=template, add_generation_prompt=True)
            assert chat.prompt(render, talk[:-1]) == prompt["input_ids"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "template", "loss_on", "expected"),
    [
        ("chatml", None, "assistant", "⟦A dog.<|im_end|>\n⟧"),
        ("chatml", None, "all", "⟦<|im_start|>assistant\nA dog.<|im_end|>\n⟧"),
        ("gemma", None, "last-answer", "⟦A dog.<end_of_turn>\n⟧"),
        ("mistral", None, "assistant", "⟦ A dog.</s>⟧"),
        ("llama3", MARKED["llama3"], "assistant", "⟦A dog.<|eot_id|>⟧"),
        # A mark that leaves out the end of the turn: the end is learned all the same.
        ("chatml", MARKED["chatml"].replace("'<|im_end|>' }}{% endgen", "'' }}{% endgeneration %}{{ '<|im_end|>' }}{#"),
         "assistant", "⟦A dog.<|im_end|>⟧\n"),
        # A template without an end: the tokenizer's own is put behind the answer.
        ("mistral", "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if "
         "add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", "assistant", "⟦A dog.\n</s>⟧"),
    ],
)  # fmt: skip
def test_what_counts(tmp_path, name, template, loss_on, expected):
    if template and "{#" in template:
        template = template.replace("{#eration %}", "")
    text = shown(own_chat(tmp_path, name, template), loss_on=loss_on)
    assert text.endswith(expected.removeprefix("⟦") if loss_on == "all" else expected)


@pytest.mark.usefixtures("here")
def test_pad_that_is_the_end_is_learned_as_end(tmp_path):
    chat = own_chat(tmp_path)
    assert chat.tokenizer.pad_id in chat.tokenizer.end_ids
    with chat.renderer() as render:
        counted = chat.counted(render, TALK, "assistant")
    assert [i for i, yes in zip(counted.ids, counted.is_counted, strict=True) if yes][-2] == chat.tokenizer.pad_id


@pytest.mark.usefixtures("here")
def test_where_earlier_answers_are_rewritten_the_last_counts_alone(tmp_path):
    chat = own_chat(tmp_path, "qwen3")
    with chat.renderer() as render:
        found = [chat.counted(render, talk, "assistant") for talk in TALKS]
        expected = [chat.counted(render, talk, "last-answer") for talk in TALKS]
    assert [each.is_rewritten for each in found] == [False, True, False, True]
    assert [each.is_counted for each in found] == [each.is_counted for each in expected]
    # A prompt that begins the answer otherwise than the answer is written.
    broken = QWEN3.replace("{{- '<|im_start|>assistant\n' }}{%- endif %}", "{{- '<|im_start|>model\n' }}{%- endif %}")
    assert broken != QWEN3
    chat = own_chat(tmp_path, "qwen3", broken)
    with chat.renderer() as render, pytest.raises(RenderingFailed, match="nothing says what counts"):
        chat.counted(render, TALK, "assistant")


@pytest.mark.usefixtures("here")
def test_a_templates_own_words_say_why_it_refuses_a_conversation(tmp_path):
    chat = own_chat(tmp_path, "gemma")
    with chat.renderer() as render, pytest.raises(RenderingFailed, match="Conversation roles must alternate"):
        chat.counted(render, [*ASKED, *TALK], "assistant")


@pytest.mark.usefixtures("here")
def test_a_run_has_one_date(tmp_path):
    chat = own_chat(tmp_path, "llama3", day="2025-12-03")
    assert "Today Date: 03 Dec 2025\n" in shown(chat)
    assert TextTokenizer.from_json(chat.tokenizer.to_json()).settings.date == "2025-12-03"
    day = time.strftime("%Y-%m-%d")
    assert own_chat(tmp_path, "llama3", day="").tokenizer.settings.date in (day, time.strftime("%Y-%m-%d"))
    for written, expected in (
        ("{{ strftime_now ('%Y-%m-%d') }}", "2025-12-03"),
        ("{% set f = strftime_now %}{% for m in messages[:1] %}{{ f(format='%-d.%m.' ~ '%Y %H:%M') }}{% endfor %}",
         "3.12.2025 00:00"),
        ("\n- {% macro m() %}{{ strftime_now('%A, %d %B') }}{% endmacro %}{{ m() }}", "\n- Wednesday, 03 December"),
    ):  # fmt: skip
        text = shown(own_chat(tmp_path, "chatml", written + CHATML, day="2025-12-03"))
        assert text.startswith(f"{expected}<|im_start|>user")


@pytest.mark.usefixtures("here")
def test_the_end_of_a_turn_joins_the_ends(tmp_path):
    chat = own_chat(tmp_path, "llama3")
    assert [chat.tokenizer.token(i) for i in chat.tokenizer.end_ids] == ["<|end_of_text|>", "<|eot_id|>"]


@pytest.mark.usefixtures("here")
def test_a_chosen_template_needs_marks_that_are_tokens_unless_all_is_trained(tmp_path):
    with pytest.raises(
        ValueError, match=r'the template writes <\|im_end\|>, which is \d+ tokens .*model\.trainable = "full"'
    ):
        own_chat(tmp_path, "mistral", chosen="chatml")
    assert shown(own_chat(tmp_path, "mistral", chosen="chatml", trains_all=True)).endswith("⟦A dog.<|im_end|>\n</s>⟧")
    assert own_chat(tmp_path, "qwen3", chosen="chatml").template == CHATML
    (tmp_path / "own.jinja").write_text(TEMPLATES["smollm2"])
    chat = own_chat(tmp_path, "chatml", chosen=str(tmp_path / "own.jinja"))
    assert chat.tokenizer.settings.files["chat_template.jinja"] == TEMPLATES["smollm2"]
    with pytest.raises(ValueError, match=r"task\.chat-template: expected chatml or a file with a template, found 'no'"):
        own_chat(tmp_path, "chatml", chosen="no")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("mark", ["<\uff5cUser\uff5c>", "<reserved_106>", "<extra_id_1>", "<|system|>"])
def test_marks_of_any_form_are_looked_up_in_the_tokenizer(tmp_path, mark, caplog):
    # The last one stands in a system's message alone.
    start = f"{{{{ '{mark}' if message['role'] in {('system', 'user' if 'system' not in mark else '')} else '' }}}}"
    template = CHATML.replace("%}{{ '<|im_start|>' + m", f"%}}{start}{{{{ '<|im_start|>' + m")
    (tmp_path / "own.jinja").write_text(template)
    written = re.escape(f"the template writes {mark}, which is ") + r"\d+ tokens"
    with pytest.raises(ValueError, match=written):
        own_chat(tmp_path / "a", chosen=str(tmp_path / "own.jinja"))
    # A model's own template: its weights may know the text.
    own_chat(tmp_path / "b", template=template)
    assert re.search(written, caplog.text)


@pytest.mark.usefixtures("here")
def test_words_in_double_brackets_are_no_marks(tmp_path, caplog):
    own_chat(tmp_path, template=CHATML.replace("message['content']", "'<<SYS>>' + message['content']"))
    assert "the template writes" not in caplog.text


@pytest.mark.usefixtures("here")
def test_a_tokenizer_that_is_trained_here_gets_the_marks_as_tokens():
    plain = train_tokenizer(["a dog barks", "the king reads"], 300, False)
    with pytest.raises(ValueError, match=r"task\.chat-template: expected chatml or a file, for the tokenizer has no"):
        ChatTemplate.chosen(plain, "", "")
    chat = ChatTemplate.chosen(plain, "chatml", "")
    with chat.renderer() as render:
        tokenizer = chat.checked(render, gets_marks=True, needs_marks=True).tokenizer
    assert [len(tokenizer.encode_places(mark)[0]) for mark in ("<|im_start|>", "<|im_end|>")] == [1, 1]
    assert tokenizer.vocab_size == plain.vocab_size + 2


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.role }}{% endfor %}", "{{ 1 // 0 }}", "{{"])
@pytest.mark.usefixtures("here")
def test_a_template_that_cannot_be_used_is_refused(tmp_path, template):
    with pytest.raises(ValueError, match=r"task\.chat-template: the template (leaves out|refuses)"):
        own_chat(tmp_path, "chatml", template)


def test_a_template_is_found_where_the_library_finds_it(tmp_path):
    library = chat_tokenizer("chatml", "{{ 'a' }}")
    library.save_pretrained(tmp_path / "a")
    library.save_pretrained(tmp_path / "b", save_jinja_files=False)
    library.chat_template = {"default": "{{ 'a' }}", "tool_use": "{{ 'b' }}"}
    library.save_pretrained(tmp_path / "c", save_jinja_files=False)
    for name in "abc":
        assert own_template(load_tokenizer(str(tmp_path / name), complete=False)) == "{{ 'a' }}"
    (tmp_path / "a" / "chat_template.jinja").unlink()
    assert own_template(load_tokenizer(str(tmp_path / "a"), complete=False)) == ""


def test_whoever_takes_a_template_cannot_leave_the_sandbox():
    render = chat_renderer.make_renderer("{{ messages.__class__.__mro__ }}", {}, "2026-01-31")
    (refused,) = render([{"messages": ASKED, "prompt": False}])
    assert "unsafe" in refused


def test_many_places_are_looked_up_in_one_pass():
    spans = [(4 * i, 4 * i + 2) for i in range(100_000)]
    places = [(2 * i, 2 * i + 2) for i in range(200_000)]
    assert chat_template._within(places, spans) == [True, False] * 100_000
    assert chat_template._within([(0, 1), (1, 3), (3, 3), (4, 6)], [(5, 9), (0, 3), (0, 1)]) == [
        True,
        True,
        False,
        True,
    ]


def test_what_a_template_gives_is_bounded_for_all_texts_of_a_line_together(monkeypatch):
    jobs = [{"messages": ASKED, "prompt": False}] * 3
    (refused,) = chat_renderer.make_renderer("{{ raise_exception('x' * 3000000) }}", {}, "2026-01-31")(jobs)
    assert refused == "x" * 200
    monkeypatch.setattr(chat_renderer, "MOST_CHARACTERS", 25)
    render = chat_renderer.make_renderer("{{ 'a' * 10 }}", {}, "2026-01-31")
    assert len(render(jobs[:2])) == 2 and render(jobs) == ["texts of 30 characters, expected at most 25"]


@pytest.mark.slow
def test_a_line_beyond_its_bound_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "_LONGEST_LINE", 40)
    with pytest.raises(ValueError, match="the program that renders the template was ended"):
        own_chat(tmp_path, "chatml")


@pytest.mark.slow
@pytest.mark.promise
def test_the_program_that_renders_is_bounded_in_time_and_memory(tmp_path, monkeypatch):
    chat = own_chat(tmp_path, "chatml")
    assert shown(chat).endswith("⟦A dog.<|im_end|>\n⟧")
    script = tmp_path / "quick.py"
    text = open(chat_renderer.__file__).read().replace("PROCESSOR_S = 10", "PROCESSOR_S = 1")
    script.write_text(text)
    monkeypatch.setattr(chat_renderer, "__file__", str(script))
    endless = CHATML + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"task\.chat-template: .* the program .* was ended by the system; its bounds"):
        own_chat(tmp_path, "chatml", endless)
    for large in ("{{ 'a' * 9999999999 }}", "{{ 'a' * 9999999 }}"):
        with pytest.raises(ValueError, match="of memory|characters, expected at most"):
            own_chat(tmp_path, "chatml", CHATML + large)


@pytest.mark.slow
def test_the_program_ends_with_its_use(tmp_path, monkeypatch):
    programs, start = [], subprocess.Popen

    def noted(*arguments, **options):
        programs.append(start(*arguments, **options))
        return programs[-1]

    monkeypatch.setattr(chat_template.subprocess, "Popen", noted)
    with pytest.raises(RuntimeError), own_chat(tmp_path, "chatml").renderer():
        raise RuntimeError
    assert len(programs) == 2 and all(program.poll() is not None for program in programs)
