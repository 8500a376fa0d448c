//! [`Conversations`]: JSON lines with a conversation each, as rows for a language model, whose loss counts the assistant's answers alone.
//!
//! ```text
//! a row of 9:   <user> Hi <end> <model> Hello . <end> <user> Bye <end>   the text that the template makes, as tokens
//! inputs:       <user> Hi <end> <model> Hello .  <end> <user> Bye
//! targets:       -     -   -     Hello   .   <end>  -    -    -          - is -100, which losses ignore
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_parallel::Content;
use phalanx_tensor::Tensor;
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::template::Rendered;
use super::{Answers, ChatTemplate, Codec, Message};
use crate::data::{Dataset, HOST, JsonLines, kind};
use crate::{Error, Result, check_memory, digest};

/// The target that losses ignore.
const IGNORED: i64 = -100;
/// What stands in a row behind its tokens. No target depends on it.
const PADDING: i64 = 0;
/// Fields of a line that would change the text, which no template gets from here.
const UNSUPPORTED: [&str; 4] = ["tools", "functions", "documents", "chat_template_kwargs"];
/// Bytes in memory for each byte of a file: at most one token of four bytes.
const FILE_BYTES: f64 = 4.0;

/// A file with a conversation on each line, as a data set of inputs `[context]` and targets `[context]`, i64. A line is
/// `{"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}]}`, or short
/// `{"prompt": "..", "completion": ".."}`, which is a user's message and an answer. Other fields are passed over.
///
/// The template makes the text, and the tokens of the assistant's answers are targets, each with the end of its turn; all other targets are
/// ignored. A conversation is padded or cut to the context. An item counts as often as it has such targets ([`Dataset::counted`]).
pub struct Conversations {
    path: PathBuf,
    context: usize,
    conversations: Vec<Conversation>,
    /// The conversations of each item.
    items: Vec<Vec<usize>>,
    /// Whether items have a third tensor, where their conversations begin.
    packed: bool,
    /// A digest of the messages and the template.
    digest: u64,
    /// The largest token.
    top: u32,
}

/// A conversation as tokens, cut to one more than the context.
struct Conversation {
    tokens: Vec<u32>,
    /// Which of them are an answer's. None is the first.
    answers: Vec<Range<usize>>,
    /// How many tokens were cut off, and how many of them were an answer's.
    cut: [usize; 2],
    digest: u64,
}

impl Conversations {
    /// Reads a file, on all cores.
    ///
    /// # Errors
    /// With file and line: if a line is no conversation, the template refuses it, or no token of an answer is left within the context. If the
    /// file cannot be read or its tokens do not fit into memory.
    pub fn open(
        path: impl AsRef<Path>,
        codec: &Codec,
        template: &ChatTemplate,
        context: usize,
        answers: Answers,
    ) -> Result<Conversations> {
        let path = path.as_ref();
        let bytes = std::fs::metadata(path).map_err(|e| Error::file(path, e))?.len() as f64;
        check_memory(&[("conversations as tokens", bytes * FILE_BYTES)]).map_err(|e| Error::file(path, e))?;
        let lines = JsonLines::open(path)?;
        let read = |line: usize| {
            let messages = messages(lines.value(line)?);
            let row = messages.and_then(|messages| tokens(&messages, codec, template, context, answers));
            row.map_err(|why| lines.wrong(line, why))
        };
        let all: Vec<Result<Conversation>> = (0..lines.len()).into_par_iter().map(read).collect();
        let all = all.into_iter().collect::<Result<Vec<Conversation>>>()?;
        let how = [digest(template.source().as_bytes()), answers as u64];
        let digests = all.iter().map(|one| one.digest).chain(how);
        let digest = digest(&digests.flat_map(u64::to_le_bytes).collect::<Vec<u8>>());
        let top = all.iter().flat_map(|one| one.tokens.iter().copied()).max().unwrap_or(0);
        let items = (0..all.len()).map(|one| vec![one]).collect();
        Ok(Conversations {
            path: path.into(),
            context,
            conversations: all,
            items,
            packed: false,
            digest,
            top,
        })
    }

    /// The same conversations, several in a row as long as they fit. A row has a third tensor, as [`Packed`](crate::data::Packed): attention stays
    /// inside a conversation, and its positions begin anew. So each has the losses that it has in a row of its own. The longest are placed
    /// first, each in the row where the least is left behind it.
    #[must_use]
    pub fn packed(mut self) -> Conversations {
        let mut order: Vec<usize> = (0..self.conversations.len()).collect();
        order.sort_by_key(|&one| std::cmp::Reverse(self.conversations[one].len()));
        let (mut items, mut with_room): (Vec<Vec<usize>>, BTreeMap<usize, Vec<usize>>) = Default::default();
        for one in order {
            let length = self.conversations[one].len();
            let found =
                with_room.range_mut(length..).next().and_then(|(&room, items)| Some((room, items.pop()?)));
            let (room, item) = found.unwrap_or_else(|| {
                items.push(Vec::new());
                (self.context, items.len() - 1)
            });
            if with_room.get(&room).is_some_and(Vec::is_empty) {
                with_room.remove(&room);
            }
            items[item].push(one);
            with_room.entry(room - length).or_default().push(item);
        }
        (self.items, self.packed) = (items, true);
        self
    }

    /// Refuses tokens that a model with this vocabulary does not know.
    pub(super) fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        if (self.top as usize) < vocabulary {
            return Ok(());
        }
        let why = format!("got token {}, wanted one of the model's vocabulary of {vocabulary}", self.top);
        Err(Error::file(&self.path, why))
    }

    /// The number of conversations, and a digest of the messages and the template.
    pub(super) fn identity(&self) -> String {
        format!("{} conversations {:016x}", self.conversations.len(), self.digest)
    }

    /// What the file has, and what of it was cut off, as a sentence.
    pub fn summary(&self) -> String {
        let count = |of: fn(&Conversation) -> usize| self.conversations.iter().map(of).sum::<usize>();
        let (tokens, answers) = (count(|one| one.tokens.len()), count(Conversation::counted));
        let mut said = format!(
            "{}: {} conversations, {tokens} tokens, {answers} of them answers'",
            self.path.display(),
            self.conversations.len()
        );
        if self.packed {
            said += &format!(", in {} rows", self.items.len());
        }
        let cut = self.conversations.iter().filter(|one| one.cut[0] > 0).count();
        if cut > 0 {
            let [left_out, of_answers] = [count(|one| one.cut[0]), count(|one| one.cut[1])];
            said += &format!(
                "; {cut} were cut to `context` {}, which leaves out {left_out} more tokens, {of_answers} of them answers'",
                self.context
            );
        }
        said
    }
}

impl Conversation {
    /// Positions in a row: the last token is a target alone.
    fn len(&self) -> usize {
        self.tokens.len() - 1
    }

    fn counted(&self) -> usize {
        self.answers.iter().map(Range::len).sum()
    }
}

impl Dataset for Conversations {
    fn len(&self) -> usize {
        self.items.len()
    }

    fn item(&self, index: usize, _draw: u64) -> Result<Vec<Tensor>> {
        let Some(item) = self.items.get(index) else {
            let why = format!("got item {index}, wanted one of {}", self.items.len());
            return Err(Error::file(&self.path, why));
        };
        let mut inputs = vec![PADDING; self.context];
        let mut targets = vec![IGNORED; self.context];
        let mut starts = vec![0; self.context];
        let mut start = 0;
        for one in item.iter().map(|&one| &self.conversations[one]) {
            for (input, &token) in inputs[start..].iter_mut().zip(&one.tokens[..one.len()]) {
                *input = token.into();
            }
            for place in one.answers.iter().cloned().flatten() {
                targets[start + place - 1] = one.tokens[place].into();
            }
            // What follows, another conversation or padding, begins there.
            start += one.len();
            starts[start..].fill(start as i64);
        }
        let tensor = |values: &[i64]| Tensor::from_slice(values, &[self.context], HOST);
        let mut tensors = vec![tensor(&inputs)?, tensor(&targets)?];
        if self.packed {
            tensors.push(tensor(&starts)?);
        }
        Ok(tensors)
    }

    fn contents(&self) -> Vec<Content> {
        vec![Content::File(self.path.clone())]
    }

    fn counted(&self, index: usize) -> Option<usize> {
        Some(self.items.get(index)?.iter().map(|&one| self.conversations[one].counted()).sum())
    }
}

/// The messages of a line.
fn messages(line: Value) -> Result<Vec<Message>> {
    let Value::Object(mut fields) = line else {
        return refuse(format!(
            "got {}, wanted an object with `messages`, or with `prompt` and `completion`",
            kind(&line)
        ));
    };
    if let Some(name) = UNSUPPORTED.iter().find(|name| !fields.get(**name).unwrap_or(&Value::Null).is_null())
    {
        return refuse(format!("got `{name}`, which is not supported, wanted messages alone"));
    }
    let mut text = |name: &str| match fields.remove(name) {
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Null) | None => Ok(None),
        Some(other) if name == "completion" => {
            refuse(format!("got {} under `{name}`, wanted a text", kind(&other)))
        }
        // Beside `messages` it may be anything.
        Some(_) => Ok(None),
    };
    let (prompt, completion) = (text("prompt")?, text("completion")?);
    match (fields.remove("messages"), prompt, completion) {
        (Some(_), _, Some(_)) => refuse("got both `messages` and `completion`, wanted one of them".into()),
        (Some(Value::Array(all)), ..) => all.into_iter().enumerate().map(message).collect(),
        (None, Some(prompt), Some(completion)) => {
            Ok(vec![Message::new("user", prompt), Message::new("assistant", completion)])
        }
        (Some(other), ..) => refuse(format!("got {} under `messages`, wanted a list", kind(&other))),
        (None, ..) => {
            let names: Vec<&String> = fields.keys().collect();
            let wanted = "wanted `messages`, or the texts `prompt` and `completion`";
            refuse(format!("got no conversation (further fields: {names:?}), {wanted}"))
        }
    }
}

fn message((number, value): (usize, Value)) -> Result<Message> {
    let wanted = "wanted {\"role\": \"..\", \"content\": \"..\"}";
    let Value::Object(mut fields) = value else {
        return refuse(format!("message {number}: got {}, {wanted}", kind(&value)));
    };
    let text = |name: &str, fields: &mut Map<String, Value>| match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => refuse(format!("message {number}: got {} under `{name}`, {wanted}", kind(&other))),
        None => refuse(format!("message {number}: got no `{name}`, {wanted}")),
    };
    let (role, content) = (text("role", &mut fields)?, text("content", &mut fields)?);
    match fields.iter().find(|(_, value)| !value.is_null()) {
        Some((name, _)) => {
            refuse(format!("message {number}: got `{name}`, which is not supported, {wanted}"))
        }
        None => Ok(Message { role, content }),
    }
}

/// The tokens of a conversation.
fn tokens(
    messages: &[Message],
    codec: &Codec,
    template: &ChatTemplate,
    context: usize,
    which: Answers,
) -> Result<Conversation> {
    if !messages.iter().any(|message| message.role == "assistant") {
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        return refuse(format!("got messages of the roles {roles:?}, wanted one of the role `assistant`"));
    }
    let Rendered { text, answers } = template.render_answers(messages, which)?;
    let (mut tokens, answers) = codec.encode_spans(&text, &answers)?;
    let whole = tokens.len();
    let before = answers.first().map_or(whole, |answer| answer.start);
    tokens.truncate(context + 1);
    // The first token is no target, since no token comes before it.
    let kept = |answer: &Range<usize>| answer.start.max(1).min(tokens.len())..answer.end.min(tokens.len());
    let inside: Vec<_> = answers.iter().map(kept).filter(|answer| !answer.is_empty()).collect();
    let all: usize = answers.iter().map(Range::len).sum();
    let left: usize = inside.iter().map(Range::len).sum();
    if left == 0 {
        let why = format!("{before} of its {whole} tokens come before the first answer");
        return refuse(format!("no token of an answer is left in a row of `context` {context}: {why}"));
    }
    let said: Vec<u8> =
        messages.iter().flat_map(|m| format!("{:?}{:?}", m.role, m.content).into_bytes()).collect();
    let cut = [whole - tokens.len(), if whole > tokens.len() { all - left } else { 0 }];
    Ok(Conversation { tokens, answers: inside, cut, digest: digest(&said) })
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::Config(why))
}

#[cfg(test)]
mod tests;
