//! The safetensors format: a JSON header of names, dtypes, shapes and offsets, then the bytes.
//!
//! ```text
//! u64 header length | {"__metadata__": {..}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}} | bytes
//! ```
//!
//! The header is validated here in full, so that errors name the tensor; tests hold reader and writer against the
//! format's reference implementation. Source: <https://huggingface.co/docs/safetensors>.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Map, atomic, bytes_of};
use crate::{DType, Device, Error, Result, Tensor};

/// The largest header the format allows, in bytes.
const HEADER_MAX: usize = 100_000_000;
/// The key in the header that is no tensor.
const METADATA: &str = "__metadata__";

/// An open safetensors file. Opening reads the header only; [`SafeTensors::tensor`] copies one tensor's bytes.
///
/// The file is mapped into memory: it must not be changed or truncated *in place* while it is open (replacing it,
/// as [`save_safetensors`] does, is fine). That is the one condition the library cannot check.
#[derive(Debug)]
pub struct SafeTensors {
    path: PathBuf,
    map: Map,
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Entry {
    /// As written in the file.
    dtype: String,
    shape: Vec<usize>,
    /// In the file.
    bytes: Range<usize>,
}

impl SafeTensors {
    /// Opens a file and validates its header.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read or is not a safetensors file through and through: offsets must cover
    /// the data without gaps or overlaps, and agree with shapes and dtypes.
    pub fn open(path: impl AsRef<Path>) -> Result<SafeTensors> {
        let path = path.as_ref().to_path_buf();
        let map = Map::open(&path)?;
        let wrong = |why: String| Error::file(&path, format!("not a valid safetensors file: {why}"));
        let (entries, metadata) = parse(map.bytes()).map_err(wrong)?;
        Ok(SafeTensors { path, map, entries, metadata })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether there is such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The file's free-form metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// A tensor's shape, without reading it.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such tensor.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.entry(name)?.shape)
    }

    /// A tensor's dtype, without reading it.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such tensor or its dtype is none of ours.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        let tag = &self.entry(name)?.dtype;
        dtype_of(tag).ok_or_else(|| {
            let known: Vec<_> = DType::ALL.into_iter().map(tag_of).collect();
            let why = format!("tensor {name:?} has dtype {tag:?}, supported are {}", known.join(", "));
            Error::file(&self.path, why)
        })
    }

    /// A copy of a tensor on `device`; on a `meta` device nothing is read.
    ///
    /// # Errors
    /// As [`SafeTensors::dtype`], or if the tensor cannot be allocated.
    pub fn tensor(&self, name: &str, device: Device) -> Result<Tensor> {
        let (dtype, entry) = (self.dtype(name)?, self.entry(name)?);
        // `parse` has checked that the range lies in the file.
        Tensor::from_bytes(&self.map.bytes()[entry.bytes.clone()], &entry.shape, dtype, device)
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| Error::file(&self.path, format!("there is no tensor {name:?}")))
    }
}

/// Writes a file that holds the tensors, atomically (see [`atomic::write`]). Equal content makes equal bytes: the
/// tensors are sorted by the size of their dtype, largest first, then by name, the metadata by key.
///
/// # Errors
/// If a name comes twice or is `__metadata__`, a tensor has no elements to read (`meta`), or the file cannot be
/// written. Nothing is left behind then.
pub fn save_safetensors<'a, N: Into<String>>(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (N, &'a Tensor)>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let tensors: Vec<(String, &Tensor)> = tensors.into_iter().map(|(n, t)| (n.into(), t)).collect();
    let entry = |(name, t): &(String, &Tensor)| TensorEntry::new(name.clone(), t.dtype(), t.shape());
    let entries = tensors.iter().map(entry).collect();
    write_safetensors(path, entries, metadata, |number| Ok::<_, Error>(tensors[number].1.clone()))
}

/// A tensor that a file has, or will have.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl TensorEntry {
    /// The entry of these.
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[usize]) -> TensorEntry {
        TensorEntry { name: name.into(), dtype, shape: shape.into() }
    }

    /// Its bytes in a file.
    pub fn bytes(&self) -> usize {
        self.shape.iter().fold(self.dtype.size(), |bytes, &n| bytes.saturating_mul(n))
    }
}

/// [`save_safetensors`] of tensors that are made one at a time, each when it is written. `tensor` gets a number in `entries`.
///
/// # Errors
/// Those of [`save_safetensors`] and of `tensor`; or if a tensor is not as its entry says.
pub fn write_safetensors<E: From<Error>>(
    path: impl AsRef<Path>,
    entries: Vec<TensorEntry>,
    metadata: &BTreeMap<String, String>,
    mut tensor: impl FnMut(usize) -> Result<Tensor, E>,
) -> Result<(), E> {
    let path = path.as_ref();
    let mut entries: Vec<(usize, TensorEntry)> = entries.into_iter().enumerate().collect();
    entries.sort_by(|(_, a), (_, b)| (b.dtype.size(), &a.name).cmp(&(a.dtype.size(), &b.name)));
    let header = header(entries.iter().map(|(_, entry)| entry), metadata);
    let header = header.map_err(|why| Error::file(path, why))?;
    let mut failed = None;
    let written = atomic::write(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        for (number, TensorEntry { name, dtype, shape }) in &entries {
            let named = |e: Error| io::Error::other(Error::file(path, format!("tensor {name:?}: {e}")));
            let tensor = tensor(*number).map_err(|e| {
                failed = Some(e);
                io::Error::other("see `failed`")
            })?;
            if (tensor.dtype(), tensor.shape()) != (*dtype, shape) {
                let why = format!("got {} {:?}, wanted {dtype} {shape:?}", tensor.dtype(), tensor.shape());
                return Err(named(Error::invalid("write_safetensors", why)));
            }
            tensor.with_bytes("save_safetensors", |bytes| file.write_all(bytes)).map_err(named)??;
        }
        Ok(())
    });
    failed.map_or(written.map_err(E::from), Err)
}

/// The header, padded with spaces so that the data begins at a multiple of 8 bytes.
fn header<'a>(
    entries: impl Iterator<Item = &'a TensorEntry>,
    metadata: &BTreeMap<String, String>,
) -> Result<String, String> {
    let (mut items, mut start) = (Vec::new(), 0);
    if !metadata.is_empty() {
        items.push(format!("{:?}:{}", METADATA, json!(metadata)));
    }
    let mut names = std::collections::BTreeSet::from([METADATA]);
    for entry in entries {
        let TensorEntry { name, dtype, shape } = entry;
        if !names.insert(name) {
            return Err(format!("the name {name:?} is taken"));
        }
        let end = start + entry.bytes();
        let (key, dtype, shape) = (json!(name), tag_of(*dtype), json!(shape));
        items.push(format!(
            "{key}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{start},{end}]}}"
        ));
        start = end;
    }
    let mut text = format!("{{{}}}", items.join(","));
    let padded = text.len().next_multiple_of(8);
    if padded > HEADER_MAX {
        return Err(format!("a header of {padded} bytes; the format allows {HEADER_MAX}"));
    }
    text.push_str(&" ".repeat(padded - text.len()));
    Ok(text)
}

type Parsed = (BTreeMap<String, Entry>, BTreeMap<String, String>);

/// Parses and validates a whole file; no allocation is larger than the header accounts for.
fn parse(file: &[u8]) -> Result<Parsed, String> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(format!("{} bytes are too few for a header", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    let fits = usize::try_from(length).ok().filter(|&n| n <= HEADER_MAX);
    let (header, data) = fits.and_then(|n| rest.split_at_checked(n)).ok_or_else(|| {
        format!("a header of {length} bytes, in a file of {} (at most {HEADER_MAX})", file.len())
    })?;
    let header = std::str::from_utf8(header).map_err(|e| format!("the header is not UTF-8: {e}"))?;
    let header: BTreeMap<String, Value> =
        serde_json::from_str(header).map_err(|e| format!("the header is not JSON of the right form: {e}"))?;
    let (mut entries, mut metadata) = (BTreeMap::new(), BTreeMap::new());
    for (name, value) in header {
        if name == METADATA {
            metadata = serde_json::from_value(value).map_err(|e| format!("{METADATA}: {e}"))?;
            continue;
        }
        let entry = entry_of(&value).ok_or_else(|| {
            format!("tensor {name:?}: wanted a dtype, a shape and two ascending data_offsets")
        })?;
        entries.insert(name, entry);
    }
    let data_start = file.len() - data.len();
    check_coverage(&mut entries, data_start, data.len())?;
    Ok((entries, metadata))
}

fn entry_of(value: &Value) -> Option<Entry> {
    let size = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
    let sizes = |key| value.get(key)?.as_array()?.iter().map(size).collect::<Option<Vec<usize>>>();
    let dtype = value.get("dtype")?.as_str()?.to_string();
    let [start, end] = sizes("data_offsets")?[..] else { return None };
    (start <= end).then_some(Entry { dtype, shape: sizes("shape")?, bytes: start..end })
}

/// Checks that the tensors cover the data exactly, and makes their offsets those in the file.
fn check_coverage(
    entries: &mut BTreeMap<String, Entry>,
    data_start: usize,
    length: usize,
) -> Result<(), String> {
    let mut sorted: Vec<_> = entries.iter_mut().collect();
    sorted.sort_by_key(|(_, entry)| (entry.bytes.start, entry.bytes.end));
    let mut at = 0;
    for (name, entry) in sorted {
        let Range { start, end } = entry.bytes;
        if start != at || end > length {
            let wanted = format!("a tensor that begins at {at} and ends by {length}");
            return Err(format!("tensor {name:?}: data_offsets [{start}, {end}], wanted {wanted}"));
        }
        // Where the dtype is none of ours, its size is unknown and the bytes are never read.
        if let Some(dtype) = dtype_of(&entry.dtype)
            && bytes_of(&entry.shape, dtype) != Some(end - start)
        {
            let shape = &entry.shape;
            return Err(format!("tensor {name:?}: {} bytes for shape {shape:?} of {dtype}", end - start));
        }
        entry.bytes = data_start + start..data_start + end;
        at = end;
    }
    if at != length {
        return Err(format!("the tensors account for {at} of {length} bytes of data"));
    }
    Ok(())
}

fn tag_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::U8 => "U8",
        DType::Bool => "BOOL",
    }
}

fn dtype_of(tag: &str) -> Option<DType> {
    DType::ALL.into_iter().find(|&dtype| tag_of(dtype) == tag)
}
