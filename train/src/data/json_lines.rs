//! [`JsonLines`]: a file with a JSON value on each line, read a line at a time.

use std::path::Path;
use std::sync::Arc;

use phalanx_parallel::Content;
use phalanx_tensor::Tensor;
use serde_json::Value;

use super::Dataset;
use super::dataset::in_range;
use super::file::RandomAccessFile;
use crate::{Error, Result};

/// A file with a JSON value on each line. Where each line begins is found out once and kept, in eight bytes a line; values are read
/// where they lie. Blank lines are passed over. Clones share the file.
#[derive(Clone, Debug)]
pub struct JsonLines(Arc<Lines>);

#[derive(Debug)]
struct Lines {
    file: RandomAccessFile,
    /// Where each line with a value begins.
    starts: Vec<u64>,
    /// For each blank line, how many lines with a value come before it.
    blanks: Vec<u64>,
}

/// Bytes that are searched for line ends at a time.
const BLOCK: usize = 1 << 20;
/// What some editors put in front of a text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl JsonLines {
    /// Opens a file and finds its lines, which reads all of it once, a block at a time.
    ///
    /// # Errors
    /// If the file cannot be read or has no line with a value.
    pub fn open(path: impl AsRef<Path>) -> Result<JsonLines> {
        let file = RandomAccessFile::open(path.as_ref())?;
        let mut head = [0; BYTE_ORDER_MARK.len()];
        let marked =
            file.len() >= head.len() as u64 && file.read(0, &mut head).map(|()| head == BYTE_ORDER_MARK)?;
        let first = if marked { head.len() as u64 } else { 0 };
        let (mut starts, mut blanks) = (Vec::new(), Vec::new());
        let (mut line, mut blank) = (first, true);
        file.each_block(first..file.len(), BLOCK, |at, block| {
            for (place, &byte) in (at..).zip(block) {
                if byte != b'\n' {
                    blank &= byte.is_ascii_whitespace();
                    continue;
                }
                match blank {
                    true => blanks.push(starts.len() as u64),
                    false => starts.push(line),
                }
                (line, blank) = (place + 1, true);
            }
            Ok(())
        })?;
        if !blank {
            starts.push(line);
        }
        match starts.is_empty() {
            true => Err(file.wrong("got blank lines only, wanted a JSON value on at least one")),
            false => Ok(JsonLines(Arc::new(Lines { file, starts, blanks }))),
        }
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.0.starts.len()
    }

    /// Never: a file without values is refused.
    pub fn is_empty(&self) -> bool {
        self.0.starts.is_empty()
    }

    /// A value.
    ///
    /// # Errors
    /// If there is none of this number, or its line cannot be read or is not JSON; the file and the line are named.
    pub fn value(&self, index: usize) -> Result<Value> {
        in_range("JsonLines", index, self.len())?;
        let lines = &*self.0;
        let end = lines.starts.get(index + 1).copied().unwrap_or(lines.file.len());
        let mut bytes = vec![0; (end - lines.starts[index]) as usize];
        lines.file.read(lines.starts[index], &mut bytes)?;
        serde_json::from_slice(&bytes).map_err(|e| {
            // The parser counts lines from this one on, so only its column is of use.
            let (why, column) = (e.to_string(), e.column());
            let why = why.split(" at line ").next().unwrap_or_default();
            self.wrong(index, format!("got no JSON value: {why} at column {column}"))
        })
    }

    /// The texts under `field` of each value.
    pub fn text(&self, field: impl Into<String>) -> JsonTexts {
        JsonTexts { lines: self.clone(), field: field.into() }
    }

    /// The values as items of a data set: `read` makes the tensors of each, on a CPU device (best on [`HOST`](super::HOST)).
    pub fn items<F>(&self, read: F) -> JsonItems<impl Fn(usize) -> Result<Vec<Tensor>> + Send + Sync + use<F>>
    where
        F: Fn(&Value) -> Result<Vec<Tensor>> + Send + Sync,
    {
        let lines = self.clone();
        let read = move |index| read(&lines.value(index)?).map_err(|e| lines.wrong(index, e));
        JsonItems { lines: self.clone(), read }
    }

    /// An error about a value's line.
    pub(crate) fn wrong(&self, index: usize, why: impl std::fmt::Display) -> Error {
        let blanks = self.0.blanks.partition_point(|&before| before <= index as u64);
        super::wrong(format!("{}, line {}", self.0.file.path().display(), index + blanks + 1), why)
    }
}

/// The texts under one field of a [`JsonLines`].
#[derive(Clone, Debug)]
pub struct JsonTexts {
    lines: JsonLines,
    field: String,
}

impl JsonTexts {
    /// How many texts there are.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// Never: a file without values is refused.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// A text.
    ///
    /// # Errors
    /// As [`JsonLines::value`], or if the value has no text under the field.
    pub fn get(&self, index: usize) -> Result<String> {
        let refuse = |got: String| {
            self.lines.wrong(index, format!("got {got}, wanted an object with a text under `{}`", self.field))
        };
        match self.lines.value(index)? {
            Value::Object(mut object) => match object.remove(&self.field) {
                Some(Value::String(text)) => Ok(text),
                Some(other) => Err(refuse(format!("{} under `{}`", kind(&other), self.field))),
                None => Err(refuse(format!("the fields {:?}", object.keys().collect::<Vec<_>>()))),
            },
            other => Err(refuse(kind(&other).into())),
        }
    }

    /// All texts in order.
    pub fn iter(&self) -> impl Iterator<Item = Result<String>> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }

    /// The texts as items of a data set: `read` makes the tensors of each.
    pub fn items<F>(&self, read: F) -> JsonItems<impl Fn(usize) -> Result<Vec<Tensor>> + Send + Sync + use<F>>
    where
        F: Fn(&str) -> Result<Vec<Tensor>> + Send + Sync,
    {
        let texts = self.clone();
        let read = move |index| read(&texts.get(index)?).map_err(|e| texts.lines.wrong(index, e));
        JsonItems { lines: self.lines.clone(), read }
    }
}

/// What an error calls a value.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The values of a [`JsonLines`], or texts in them, as items.
#[derive(Clone, Debug)]
pub struct JsonItems<F> {
    lines: JsonLines,
    read: F,
}

impl<F: Fn(usize) -> Result<Vec<Tensor>> + Send + Sync> Dataset for JsonItems<F> {
    fn len(&self) -> usize {
        self.lines.len()
    }

    fn item(&self, index: usize, _draw: u64) -> Result<Vec<Tensor>> {
        (self.read)(index)
    }

    fn contents(&self) -> Vec<Content> {
        vec![Content::File(self.lines.0.file.path().into())]
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Folder;
    use super::super::{HOST, wrong};
    use super::*;

    fn open(folder: &Folder, text: impl AsRef<[u8]>) -> Result<JsonLines> {
        JsonLines::open(folder.file("t.jsonl", text))
    }

    #[test]
    fn values_are_read_by_number_past_blank_lines_and_a_byte_order_mark() {
        let folder = Folder::new();
        let lines = open(&folder, "\u{feff}{\"a\": 1}\n\n \r\n[2]\r\n\"three\"").unwrap();
        assert_eq!((lines.len(), lines.is_empty()), (3, false));
        assert_eq!(lines.value(0).unwrap()["a"], 1);
        assert_eq!(lines.value(1).unwrap()[0], 2);
        assert_eq!(lines.value(2).unwrap(), "three");
        assert!(lines.value(3).unwrap_err().to_string().contains("got item 3, wanted one of 3"));
        assert_eq!(open(&folder, "1\n2\n").unwrap().len(), 2);
        assert_eq!(open(&folder, "1").unwrap().value(0).unwrap(), 1);
    }

    #[test]
    fn lines_longer_than_a_block_are_whole() {
        let folder = Folder::new();
        let long = "x".repeat(BLOCK + 5);
        let text = format!("\"{long}\"\n\"{long}y\"\n3\n");
        let lines = open(&folder, text).unwrap();
        assert_eq!(
            (lines.value(0).unwrap(), lines.value(2).unwrap()),
            (Value::from(long.clone()), Value::from(3))
        );
        assert_eq!(lines.value(1).unwrap(), format!("{long}y"));
    }

    #[test]
    fn texts_and_values_become_items() {
        let folder = Folder::new();
        let lines = open(&folder, "{\"text\": \"hé\", \"n\": 3}\n{\"text\": \"\", \"n\": 4}\n").unwrap();
        let texts = lines.text("text");
        assert_eq!(texts.iter().collect::<Result<Vec<_>>>().unwrap(), ["hé", ""]);
        assert_eq!((texts.len(), texts.is_empty()), (2, false));
        let bytes = texts.items(|text| Ok(vec![Tensor::from_slice(text.as_bytes(), &[text.len()], HOST)?]));
        assert_eq!(bytes.item(0, 0).unwrap()[0].to_vec::<u8>().unwrap(), "hé".as_bytes());
        let numbers = lines.items(|value| {
            let n = value["n"].as_i64().ok_or_else(|| wrong("n", "no integer"))?;
            Ok(vec![Tensor::scalar(n, HOST)?])
        });
        assert_eq!((numbers.len(), numbers.item(1, 0).unwrap()[0].item::<i64>().unwrap()), (2, 4));
    }

    #[test]
    fn what_is_wrong_is_said_with_file_and_line() {
        let folder = Folder::new();
        let lines =
            open(&folder, "{\"text\": 1}\n\n{\"text\": \"a\" oops}\n[]\n\n{\"other\": 0}\n\"\\ud800\"\n")
                .unwrap();
        let value = |i| lines.value(i).unwrap_err().to_string();
        assert!(
            value(1).ends_with("t.jsonl, line 3: got no JSON value: expected `,` or `}` at column 14"),
            "{}",
            value(1)
        );
        assert!(value(4).contains("line 7: got no JSON value"), "{}", value(4));
        let text = |i| lines.text("text").get(i).unwrap_err().to_string();
        assert!(
            text(0).ends_with("line 1: got a number under `text`, wanted an object with a text under `text`")
        );
        assert!(text(2).ends_with("line 4: got a list, wanted an object with a text under `text`"));
        assert!(
            text(3)
                .ends_with("line 6: got the fields [\"other\"], wanted an object with a text under `text`")
        );
        let refused = lines.items(|_| Err(wrong("mine", "no"))).item(3, 0).unwrap_err().to_string();
        assert!(refused.ends_with("t.jsonl, line 6: mine: no"), "{refused}");
        assert!(open(&folder, "").unwrap_err().to_string().ends_with("got an empty file, wanted data"));
        assert!(open(&folder, " \n\n").unwrap_err().to_string().contains("got blank lines only"));
        let not_utf8 = open(&folder, b"\"\xff\"\n").unwrap().value(0).unwrap_err().to_string();
        assert!(not_utf8.contains("line 1: got no JSON value"), "{not_utf8}");
    }
}
