//! [`ChatTemplate`]: the template of a Hugging Face folder, which makes the text of a conversation; and where its answers lie in that text.
//!
//! Templates are written in Jinja. `minijinja` renders them with what transformers gives them: `raise_exception`, `strftime_now`, `tojson` as
//! Python writes it, Python's methods of strings, blocks without the white space around them, and the texts of the special tokens.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde::Serialize;
use serde_json::Value as Json;

use super::Answers;
use crate::calendar::strftime;
use crate::{Error, Result};

/// What transformers calls the files.
const TEMPLATE: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
const TOKENS: &str = "special_tokens_map.json";
/// The special tokens whose texts a template knows by these names.
const SPECIAL: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// The role whose messages are answers.
const ASSISTANT: &str = "assistant";
/// What the tags `generation` and `endgeneration` become in a text: characters that Unicode keeps for such a use.
const MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }
}

/// The text of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// All of it.
    pub text: String,
    /// Which bytes of it are the answers of the assistant, each with the end of its turn.
    pub answers: Vec<Range<usize>>,
}

/// The template of a folder. Its errors name the file and the template's line.
pub struct ChatTemplate {
    /// The template's name in errors.
    name: String,
    source: String,
    environment: Environment<'static>,
    /// The variables that are the same in all conversations.
    known: Vec<(String, Value)>,
    /// Whether it has tags around answers, which become [`MARKS`].
    has_tags: bool,
}

impl ChatTemplate {
    /// The template of a folder: its `chat_template.jinja`, or the `chat_template` of its `tokenizer_config.json`, which is a text or a list of
    /// named ones, of which `default` is taken.
    ///
    /// # Errors
    /// If there is none, a file cannot be read, or the template is not Jinja.
    pub fn of(folder: &Path) -> Result<ChatTemplate> {
        let (tokens, config) = (json(&folder.join(TOKENS))?, json(&folder.join(CONFIG))?);
        let path = folder.join(TEMPLATE);
        let (name, source) = match path.exists() {
            true => {
                let source = std::fs::read_to_string(&path).map_err(|e| Error::file(&path, e))?;
                (path.display().to_string(), source)
            }
            false => {
                let path = folder.join(CONFIG);
                let source = default_of(&config, &path)?.ok_or_else(|| {
                    let why = format!(
                        "got no chat template, wanted a {TEMPLATE}, or a `chat_template` in {CONFIG}"
                    );
                    Error::file(folder, why)
                })?;
                (format!("{}, `chat_template`", path.display()), source)
            }
        };
        let mut known =
            vec![("tools".to_string(), Value::from(())), ("documents".to_string(), Value::from(()))];
        for (file, values) in [(TOKENS, &tokens), (CONFIG, &config)] {
            for token in SPECIAL {
                if let Some(text) = text_of_token(values, token, &folder.join(file))? {
                    known.retain(|(name, _)| name != token);
                    known.push((token.into(), text.into()));
                }
            }
        }
        ChatTemplate::new(name, source, known)
    }

    fn new(name: String, source: String, known: Vec<(String, Value)>) -> Result<ChatTemplate> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(|out, _, value| {
            // As Python writes them.
            match value.kind() {
                ValueKind::Bool => write!(out, "{}", if value.is_true() { "True" } else { "False" })?,
                ValueKind::None => write!(out, "None")?,
                ValueKind::Undefined => {}
                _ => write!(out, "{value}")?,
            }
            Ok(())
        });
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        // None can be iterated in Rust's, and not in Python's.
        environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_function("raise_exception", |why: String| -> std::result::Result<Value, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        // One moment for all texts, so that the beginnings of a conversation have the same date.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        environment.add_function("strftime_now", move |format: String| {
            strftime(&format, now).map_err(|why| minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        let (marked, has_tags) = with_marks(&source);
        let added = environment.add_template_owned("chat", marked);
        added.map_err(|error| wrong(&name, &error))?;
        Ok(ChatTemplate { name, source, environment, known, has_tags })
    }

    /// The template itself.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation. With `asks`, it ends where the assistant's next message begins (transformers' `add_generation_prompt`).
    ///
    /// # Errors
    /// Those of the template, which may refuse the roles or their order.
    pub fn render(&self, messages: &[Message], asks: bool) -> Result<String> {
        Ok(self.render_marked(messages, asks)?.text)
    }

    /// The text, and what has tags around it.
    fn render_marked(&self, messages: &[Message], asks: bool) -> Result<Rendered> {
        if let Some(message) = messages.iter().find(|m| self.has_tags && m.content.contains(MARKS)) {
            let why = format!("got {:?}, wanted a text without U+FDD0 and U+FDD1", message.content);
            return Err(Error::data(&self.name, why));
        }
        let message =
            |m: &Message| Value::from_iter([("role", m.role.as_str()), ("content", m.content.as_str())]);
        let own = [
            ("messages".to_string(), Value::from_iter(messages.iter().map(message))),
            ("add_generation_prompt".to_string(), asks.into()),
        ];
        let all: Value = self.known.iter().cloned().chain(own).collect();
        let rendered = self.environment.get_template("chat").and_then(|template| template.render(all));
        let text = rendered.map_err(|error| wrong(&self.name, &error))?;
        Ok(if self.has_tags { without_marks(&text) } else { Rendered { text, answers: Vec::new() } })
    }

    /// The text of a conversation and where its answers lie, all or the last alone; then the text ends with it. An answer is what the assistant's message adds to the text that asks for it,
    /// without white space behind the mark that ends the turn. If texts do not add up so, answers are what the template has between
    /// `{% generation %}` and `{% endgeneration %}`, as transformers' `return_assistant_tokens_mask` has them.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::render`]; if the text up to a message is no beginning of the whole text, so that what a model is asked is not
    /// what it has learned, and there are no such tags; if an answer's text is not in the text, as under a template for contents with images;
    /// or if nothing ends an answer. What tags enclose is taken as it is.
    pub fn render_answers(&self, messages: &[Message], which: Answers) -> Result<Rendered> {
        let mut asked: Vec<_> = messages.iter().enumerate().filter(|(_, m)| m.role == ASSISTANT).collect();
        let mut messages = messages;
        if let (Answers::Last, Some(&(last, _))) = (which, asked.last()) {
            asked.drain(..asked.len() - 1);
            messages = &messages[..=last];
        }
        let Rendered { text, answers: tagged } = self.render_marked(messages, false)?;
        let mut answers = Vec::new();
        for &(number, message) in &asked {
            let answer = match self.answer_to(messages, number, &text) {
                Err(_) if !tagged.is_empty() => {
                    // Those of the last message are not in the text without it.
                    let before = match which {
                        Answers::All => 0,
                        Answers::Last => self.render_marked(&messages[..number], false)?.answers.len(),
                    };
                    let answers = tagged.into_iter().skip(before).collect();
                    return Ok(Rendered { text, answers });
                }
                answer => answer?,
            };
            let written = &text[answer.clone()];
            let said = message.content.trim().lines().last().unwrap_or_default().trim();
            if !written.contains(said) {
                let why = format!(
                    "got {written:?} for message {number}, which does not have its text {said:?}; wanted a template that writes contents that are texts"
                );
                return Err(Error::data(&self.name, why));
            }
            let end = end_of_turn(written, &message.content);
            if end.is_empty() {
                let why = "the template writes nothing behind an answer, wanted a mark that ends the turn: a model would not learn to stop";
                return Err(Error::data(&self.name, why));
            }
            let len = if end.trim().is_empty() { written.len() } else { written.trim_end().len() };
            answers.push(answer.start..answer.start + len);
        }
        Ok(Rendered { text, answers })
    }

    /// What this message adds to the text that asks for it, if both are beginnings of the whole text.
    fn answer_to(&self, messages: &[Message], number: usize, text: &str) -> Result<Range<usize>> {
        let asked = self.render(&messages[..number], true).map_err(|error| {
            Error::data(&self.name, format!("what asks for message {number} cannot be rendered: {error}"))
        })?;
        let answered = self.render(&messages[..=number], false)?;
        if answered.starts_with(&asked) && text.starts_with(&answered) {
            return Ok(asked.len()..answered.len());
        }
        let (part, whole) = match answered.starts_with(&asked) {
            true => (answered.as_str(), text),
            false => (asked.as_str(), answered.as_str()),
        };
        let why = format!(
            "the text up to message {number} is no beginning of the text with what follows it: got {:?}, wanted {:?} there; under some such templates the last answer can be learned (`answers` last), and all under one with `generation` tags",
            from_difference(part, whole),
            from_difference(whole, part),
        );
        Err(Error::data(&self.name, why))
    }

    /// The text with which the template ends an answer.
    ///
    /// # Errors
    /// As [`ChatTemplate::render_answers`].
    pub fn end_of_turn(&self) -> Result<String> {
        let answer = "answer";
        let messages = [Message::new("user", "question"), Message::new(ASSISTANT, answer)];
        let rendered = self.render_answers(&messages, Answers::All)?;
        let (Some(first), Some(last)) = (rendered.answers.first(), rendered.answers.last()) else {
            return Ok(String::new());
        };
        Ok(end_of_turn(&rendered.text[first.start..last.end], answer).to_string())
    }
}

/// What stands behind the content in an answer's text, without white space around it if there is anything else.
fn end_of_turn<'a>(answer: &'a str, content: &str) -> &'a str {
    let content = content.trim();
    let behind = answer.find(content).map_or(answer, |at| &answer[at + content.len()..]);
    if behind.trim().is_empty() { behind } else { behind.trim() }
}

/// A text without marks, and where they were, but for nothing and white space at their ends.
fn without_marks(marked: &str) -> Rendered {
    let (mut text, mut answers, mut begun) = (String::with_capacity(marked.len()), Vec::new(), None);
    for c in marked.chars() {
        match MARKS.iter().position(|mark| *mark == c) {
            None => text.push(c),
            Some(0) => begun = Some(text.len()),
            Some(_) => {
                let from = begun.take().unwrap_or(text.len());
                let answer = from..from + text[from..].trim_end().len();
                answers.extend((!answer.is_empty()).then_some(answer));
            }
        }
    }
    Rendered { text, answers }
}

/// Some characters of a text from where it differs from another.
fn from_difference<'a>(text: &'a str, other: &str) -> &'a str {
    let same = text.chars().zip(other.chars()).take_while(|(a, b)| a == b);
    let rest = &text[same.map(|(c, _)| c.len_utf8()).sum()..];
    rest.char_indices().nth(24).map_or(rest, |(end, _)| &rest[..end])
}

/// An error of a template: file, line and reason.
fn wrong(name: &str, error: &minijinja::Error) -> Error {
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let mut why = match error.detail() {
        Some(detail) => format!("{line}{}: {detail}", error.kind()),
        None => format!("{line}{}", error.kind()),
    };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        why += &format!(": {cause}");
        source = cause.source();
    }
    Error::data(name, why)
}

/// The values of a JSON file, or null if it is not there.
fn json(path: &PathBuf) -> Result<Json> {
    if !path.exists() {
        return Ok(Json::Null);
    }
    let file = std::fs::read(path).map_err(|e| Error::file(path, e))?;
    serde_json::from_slice(&file).map_err(|e| Error::file(path, e))
}

/// The `chat_template` of a `tokenizer_config.json`.
fn default_of(config: &Json, path: &Path) -> Result<Option<String>> {
    let refuse = |got: String| {
        let wanted = "wanted a text, or a list of {\"name\", \"template\"} with the name \"default\"";
        Err(Error::file(path, format!("`chat_template`: got {got}, {wanted}")))
    };
    match &config["chat_template"] {
        Json::Null => Ok(None),
        Json::String(text) => Ok(Some(text.clone())),
        Json::Array(all) => {
            let named =
                |one: &Json| Some((one["name"].as_str()?.to_string(), one["template"].as_str()?.to_string()));
            let Some(named) = all.iter().map(named).collect::<Option<Vec<_>>>() else {
                return refuse("a list of other values".into());
            };
            match named.iter().find(|(name, _)| name == "default") {
                Some((_, template)) => Ok(Some(template.clone())),
                None => {
                    refuse(format!("the names {:?}", named.iter().map(|(name, _)| name).collect::<Vec<_>>()))
                }
            }
        }
        other => refuse(other.to_string()),
    }
}

/// The text of a special token, which is given as such or in an object.
fn text_of_token(values: &Json, token: &str, path: &Path) -> Result<Option<String>> {
    match (&values[token], &values[token]["content"]) {
        (Json::Null, _) => Ok(None),
        (Json::String(text), _) | (_, Json::String(text)) => Ok(Some(text.clone())),
        (other, _) => Err(Error::file(
            path,
            format!("`{token}`: got {other}, wanted a text, or an object with a `content`"),
        )),
    }
}

/// The template with [`MARKS`] for the tags `generation` and `endgeneration`, by which transformers marks answers and which no other Jinja knows.
/// White space around them is cut as before. And whether there are such tags.
fn with_marks(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut has_tags) = (String::with_capacity(source.len()), source, false);
    while let Some(at) = rest.find("{%")
        && let Some(end) = rest[at..].find("%}")
    {
        let (before, from) = rest.split_at(at);
        let (tag, after) = from.split_at(end + 2);
        out += before;
        let name = tag[2..end].trim_matches(['-', '+']).trim();
        let marked = match name {
            "generation" => Some(("if true", MARKS[0])),
            "endgeneration" => Some(("endif", MARKS[1])),
            _ => None,
        };
        out += &match (marked, tag.split_once(name)) {
            (Some((own, mark)), Some((left, right))) => {
                has_tags = true;
                format!("{left}{own} %}}{mark}{{% {own}{right}")
            }
            _ => tag.to_string(),
        };
        rest = after;
    }
    (out + rest, has_tags)
}

/// The filter `tojson`, as Python's `json.dumps` writes a value: not for HTML, and with spaces behind commas and colons.
fn to_json(value: Value, options: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let refuse = |e: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent);
            let pretty = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, OneLine)),
    };
    written.map_err(refuse)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// JSON in a line, with Python's spaces.
struct OneLine;

impl serde_json::ser::Formatter for OneLine {
    fn begin_array_value<W: std::io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(&mut self, to: &mut W) -> std::io::Result<()> {
        to.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
