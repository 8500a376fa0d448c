//! Templates in the style of several families, against texts that were written by hand.

use super::*;

const CHATML: &str = "\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
";

/// As Llama 3's: headers, a date, an end of turn without a line's end.
const HEADERS: &str = "\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'].strip() %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- '<|head|>system<|/head|>\\n\\nToday: ' + strftime_now('%Y') ~ '\\n' + system + '<|eot|>' }}
{%- for message in rest %}
    {%- if not (message.role in ['user', 'assistant']) %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}";

/// As Gemma's: other names of roles, and no system message.
const TURNS: &str = "\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\\n' + message['content'].strip() + '</turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}";

/// As Mistral's: no prompt of its own for the answer, `eos_token` behind it.
const BRACKETS: &str = "\
{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{ '[INST] ' + message.content + ' [/INST]' }}{% elif message.role == 'assistant' %}
{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}";

/// Keeps the thoughts of the last answer only, as Qwen3's does.
const THOUGHTS: &str = "\
{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' and loop.last %}(thinks){% endif %}
{{ message.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let known = tokens.map(|(name, text)| (name.to_string(), Value::from(text)));
    ChatTemplate::new("t.jinja".into(), source.into(), known.to_vec()).unwrap()
}

fn said(turns: &[(&str, &str)]) -> Vec<Message> {
    turns.iter().map(|(role, content)| Message::new(*role, *content)).collect()
}

fn answers(source: &str, turns: &[(&str, &str)]) -> (String, Vec<String>) {
    let Rendered { text, answers } = template(source).render_answers(&said(turns), Answers::All).unwrap();
    let texts = answers.into_iter().map(|answer| text[answer].to_string()).collect();
    (text, texts)
}

const TALK: [(&str, &str); 4] =
    [("user", "Hi"), ("assistant", "Hello."), ("user", "1 + 1?"), ("assistant", "Two.\n\n2.")];

#[test]
fn chatml_has_blocks_without_their_lines_and_answers_with_the_end_of_turn() {
    let (text, answers) = answers(CHATML, &TALK);
    let system = "<|im_start|>system\nBe brief.<|im_end|>\n";
    let turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n\
                 <|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\nTwo.\n\n2.<|im_end|>\n";
    assert_eq!(text, format!("{system}{turns}"));
    assert_eq!(answers, ["Hello.<|im_end|>", "Two.\n\n2.<|im_end|>"]);
    let asked = template(CHATML).render(&said(&[("system", "S"), ("user", " Hi ")]), true).unwrap();
    assert_eq!(
        asked,
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(template(CHATML).end_of_turn().unwrap(), "<|im_end|>");
}

#[test]
fn headers_dates_slices_and_special_tokens() {
    let (text, answers) = answers(HEADERS, &[&[("system", " S ")], &TALK[..2]].concat());
    let year =
        strftime("%Y", SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()).unwrap();
    let wanted = format!(
        "<s><|head|>system<|/head|>\n\nToday: {year}\nS<|eot|><|head|>user<|/head|>\n\nHi<|eot|>\
         <|head|>assistant<|/head|>\n\nHello.<|eot|>"
    );
    assert_eq!((text, answers), (wanted, vec!["Hello.<|eot|>".to_string()]));
    let error =
        template(HEADERS).render(&said(&[("user", "x"), ("tool", "y")]), false).unwrap_err().to_string();
    assert!(error.starts_with("t.jinja: line 6: ") && error.ends_with("unknown role tool"), "{error}");
}

#[test]
fn turns_of_other_roles_that_must_alternate() {
    let (text, answers) = answers(TURNS, &TALK[..2]);
    assert_eq!(text, "<s><turn>user\nHi</turn>\n<turn>model\nHello.</turn>\n");
    assert_eq!(answers, ["Hello.</turn>"]);
    let error = template(TURNS).render(&said(&[("user", "a"), ("user", "b")]), true).unwrap_err().to_string();
    assert!(error.ends_with("roles must alternate"), "{error}");
}

#[test]
fn brackets_have_answers_that_begin_with_a_space() {
    let (text, answers) = answers(BRACKETS, &TALK);
    assert_eq!(text, "<s>[INST] Hi [/INST] Hello.</s>[INST] 1 + 1? [/INST] Two.\n\n2.</s>");
    assert_eq!(answers, [" Hello.</s>", " Two.\n\n2.</s>"]);
}

#[test]
fn a_template_whose_beginnings_do_not_nest_is_refused_and_serves_single_answers() {
    let error = template(THOUGHTS).render_answers(&said(&TALK), Answers::All).unwrap_err().to_string();
    assert!(error.contains("up to message 1 is no beginning"), "{error}");
    assert!(error.contains(r#"got "(thinks)Hello.<end>", wanted "Hello.<end><user>1 + 1?<"#), "{error}");
    assert_eq!(answers(THOUGHTS, &TALK[..2]).1, ["(thinks)Hello.<end>"]);
    // What follows the last answer is left out.
    let further = [&TALK[..], &[("user", "b")]].concat();
    let Rendered { text, answers: last } =
        template(THOUGHTS).render_answers(&said(&further), Answers::Last).unwrap();
    assert_eq!((last.len(), &text[last[0].clone()]), (1, "(thinks)Two.\n\n2.<end>"));
    assert!(text.ends_with("<user>1 + 1?<end><assistant>(thinks)Two.\n\n2.<end>"), "{text}");
    // Asking has another beginning than the answer.
    let other = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}?{% endif %}";
    let error = template(other).render_answers(&said(&TALK), Answers::All).unwrap_err().to_string();
    assert!(error.contains(r#"got "?", wanted "assistant:Hello.;""#), "{error}");
}

/// As [`THOUGHTS`], with transformers' tags around what is learned; between them and the text there is white space of both kinds.
const TAGGED: &str = "\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {%- if loop.last %}{{ '(thinks)' }}{% endif %}
        {{- message.content }}
        {%- endgeneration %}
        {%- generation -%} <end>
        {% endgeneration %}
    {%- else %}
        {{- message.content + '<end>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}";

#[test]
fn tags_around_answers_count_where_texts_do_not_nest() {
    let (text, all) = answers(TAGGED, &TALK);
    let asked = "<user>1 + 1?<end><assistant>";
    assert_eq!(text, format!("<user>Hi<end><assistant>Hello.<end>\n{asked}(thinks)Two.\n\n2.<end>\n"));
    assert_eq!(all, ["Hello.", "<end>", "(thinks)Two.\n\n2.", "<end>"]);
    let render = |turns: &[(&str, &str)], which| {
        let Rendered { text, answers } = template(TAGGED).render_answers(&said(turns), which).unwrap();
        answers.into_iter().map(|answer| text[answer].to_string()).collect::<Vec<_>>()
    };
    // A last answer nests.
    assert_eq!(render(&TALK, Answers::Last), ["(thinks)Two.\n\n2.<end>"]);
    assert_eq!(render(&TALK[..2], Answers::All), ["(thinks)Hello.<end>"]);
    assert_eq!(template(TAGGED).end_of_turn().unwrap(), "<end>");
    // Asking has another beginning than the answer, and before the first message there is nothing to ask.
    let other = TAGGED.replace("'<assistant>'", "messages[0].role + '?'");
    let tagged = template(&other).render_answers(&said(&TALK), Answers::Last).unwrap();
    let texts: Vec<_> = tagged.answers.iter().map(|answer| &tagged.text[answer.clone()]).collect();
    assert_eq!(texts, ["(thinks)Two.\n\n2.", "<end>"]);
    assert_eq!(template(&other).end_of_turn().unwrap(), "<end>");
    assert_eq!(answers(&other, &[&TALK[1..2], &TALK[..1]].concat()).1, ["Hello.", "<end>"]);
    let untagged = other.replace("{% generation %}", "").replace("{%- generation -%}", "");
    let untagged = untagged.replace("{%- endgeneration %}", "").replace("{% endgeneration %}", "");
    let error = template(&untagged).render_answers(&said(&TALK[1..2]), Answers::All).unwrap_err().to_string();
    assert!(error.contains("what asks for message 0 cannot be rendered: t.jinja"), "{error}");
    // Content that would be taken for a tag.
    let odd = said(&[("user", "a\u{FDD0}b")]);
    let error = template(TAGGED).render(&odd, true).unwrap_err().to_string();
    assert!(error.contains("wanted a text without U+FDD0"), "{error}");
    assert_eq!(template(THOUGHTS).render(&odd, true).unwrap(), "<user>a\u{FDD0}b<end><assistant>");
}

#[test]
fn a_template_that_ends_no_answer_is_refused_and_a_lines_end_is_an_end() {
    let endless = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let error = template(endless).render_answers(&said(&TALK), Answers::All).unwrap_err().to_string();
    assert!(error.contains("writes nothing behind an answer"), "{error}");
    let lines = "{% for m in messages %}{{ m.role }}: {{ m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";
    assert_eq!(answers(lines, &TALK[..2]).1, ["Hello.\n"]);
    assert_eq!(template(lines).end_of_turn().unwrap(), "\n");
}

#[test]
fn a_template_for_contents_with_images_is_refused() {
    let parts = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let error = template(parts).render_answers(&said(&TALK[..2]), Answers::All).unwrap_err().to_string();
    assert!(error.contains(r#"for message 1, which does not have its text "Hello.""#), "{error}");
}

#[test]
fn python_is_what_templates_expect() {
    let cases = [
        ("{{ messages | tojson }}", r#"[{"role": "user", "content": "<a> & 'é'"}]"#),
        (
            "{{ {'b': [1, {}], 'a': none} | tojson(indent=2) }}",
            "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": null\n}",
        ),
        ("{{ true }} {{ none }} {{ tools }} {{ nothing }}", "True None  "),
        ("{{ 'a</t>b'.split('</t>')[-1].lstrip('b') }}{{ 'x'.startswith('x') }}", "True"),
        (
            "{% set n = namespace(i=0) %}{% for c in [1, 2, 3, 4] %}{% if c == 2 %}{% continue %}{% endif %}{% if c == 4 %}{% break %}{% endif %}{% set n.i = n.i + c %}{% endfor %}{{ n.i }}",
            "4",
        ),
        (
            "{% for m in messages[::-1] %}{{ m.get('name', 'none') }}{% for k, v in m.items() %}{{ k }}{% endfor %}{% endfor %}",
            "nonerolecontent",
        ),
        (
            "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('a') }}{%- generation -%}  b {%- endgeneration %}",
            "aab",
        ),
        (
            "{{ none is iterable }}{{ 'a' is iterable }}{{ 3 is iterable }}{{ {} is iterable }}",
            "FalseTrueFalseTrue",
        ),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages is iterable }}",
            "1True",
        ),
    ];
    let messages = said(&[("user", "<a> & 'é'")]);
    for (source, wanted) in cases {
        assert_eq!(template(source).render(&messages, false).unwrap(), wanted, "{source}");
    }
}

#[test]
fn what_is_unknown_or_no_jinja_is_named_with_its_line() {
    let error = |source: &str| template(source).render(&said(&TALK), false).unwrap_err().to_string();
    let filter = error("a\n{{ messages | frobnicate }}");
    assert!(filter.starts_with("t.jinja: line 2: ") && filter.contains("frobnicate"), "{filter}");
    for (source, name) in [
        ("{{ frob() }}", "frob"),
        ("{{ 'a'.frob() }}", "frob"),
        ("{{ nothing.at }}", "undefined"),
        ("{{ 1 | tojson(frob=1) }}", "frob"),
        ("{{ strftime_now('%Q') }}", "%Q"),
        ("{{ 1 is frob }}", "frob"),
    ] {
        let error = error(source);
        assert!(error.starts_with("t.jinja: line 1: ") && error.contains(name), "{error}");
    }
    let broken =
        ChatTemplate::new("t.jinja".into(), "\n{% for %}".into(), Vec::new()).err().unwrap().to_string();
    assert!(broken.starts_with("t.jinja: line 2: syntax error: "), "{broken}");
}

#[test]
fn a_folders_files_have_the_template_and_the_special_tokens() {
    let folder = std::env::temp_dir().join(format!("phalanx-template-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    let rendered =
        || ChatTemplate::of(&folder).and_then(|template| template.render(&said(&TALK[..1]), false));
    let refused = || rendered().unwrap_err().to_string();

    assert!(refused().contains("got no chat template, wanted a chat_template.jinja"), "{}", refused());
    write("special_tokens_map.json", r#"{"bos_token": "<b>", "eos_token": {"content": "<old>"}}"#);
    let tokens =
        r#""eos_token": {"content": "<e>", "lstrip": false}, "pad_token": null, "add_bos_token": true"#;
    write(
        "tokenizer_config.json",
        &format!(r#"{{"chat_template": "{{{{ bos_token + eos_token }}}}one", {tokens}}}"#),
    );
    assert_eq!(rendered().unwrap(), "<b><e>one");
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]}"#;
    write("tokenizer_config.json", list);
    assert_eq!(rendered().unwrap(), "two");
    write("tokenizer_config.json", &list.replace("default", "other"));
    assert!(
        refused().contains(r#"`chat_template`: got the names ["tool_use", "other"], wanted"#),
        "{}",
        refused()
    );
    write("tokenizer_config.json", r#"{"chat_template": "\n{{ x.y }}"}"#);
    assert!(refused().contains("tokenizer_config.json, `chat_template`: line 2: "), "{}", refused());
    write("tokenizer_config.json", r#"{"bos_token": 3}"#);
    write("chat_template.jinja", "three");
    assert!(refused().contains("`bos_token`: got 3, wanted a text"), "{}", refused());
    write("tokenizer_config.json", r#"{"chat_template": "one"}"#);
    assert_eq!(rendered().unwrap(), "three");
    std::fs::remove_dir_all(folder).unwrap();
}
