//! The way back into folders: a model's tensors as its family's files have them ([`InFiles`]), read one at a time from a
//! [`TensorSource`] and written into one file or several ([`SaveOptions`]). [`convert_folder`] does that with the files of a folder.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_kernels as kernels;
use phalanx_tensor::io::{TensorEntry, atomic, write_safetensors};
use phalanx_tensor::{DType, Device, Tensor};
use serde_json::{Map, Value, json};

use super::ModelConfig;
use super::fields::{dtype_name, parse_fields};
use super::hugging_face::{CONFIG, Files, HEAD_TABLE, INDEX, WEIGHTS, read_text};
use super::stored::{Layout, Rows, Stored};
use crate::{Error, Result};

/// How a folder is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SaveOptions {
    /// The dtype of floating-point tensors in the files; their own if this is none.
    pub dtype: Option<DType>,
    /// The most bytes of a file. A tensor that is larger has a file of its own.
    pub shard_bytes: usize,
}

impl Default for SaveOptions {
    /// The tensors' own dtypes, in files of 5 GB as transformers writes them.
    fn default() -> SaveOptions {
        SaveOptions { dtype: None, shard_bytes: 5_000_000_000 }
    }
}

/// The tensors of a model, of which those that are asked for are in memory.
pub trait TensorSource {
    /// All, with the names of the model's parameters.
    fn entries(&self) -> Vec<TensorEntry>;

    /// Rows of a tensor, on the CPU or a device of the tensor's.
    ///
    /// # Errors
    /// If they cannot be read.
    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor>;
}

impl TensorSource for [(String, Tensor)] {
    fn entries(&self) -> Vec<TensorEntry> {
        self.iter().map(|(name, tensor)| TensorEntry::new(name, tensor.dtype(), tensor.shape())).collect()
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor> {
        let found = self.iter().find(|(other, _)| other == name);
        let (_, tensor) =
            found.ok_or_else(|| Error::invalid("save", format!("there is no tensor {name}")))?;
        match tensor.shape().first() {
            Some(&all) if rows != (0..all) => Ok(tensor.narrow(0, rows.start, rows.len())?),
            _ => Ok(tensor.clone()),
        }
    }
}

/// Writes a model's folder from tensors that are read one at a time: weights first, `config.json` last, each file atomically. Files of
/// weights that the folder had before are gone then.
///
/// # Errors
/// If a tensor cannot be read or has not the shape of its parameter, or a file cannot be written.
pub fn save_from(
    source: &(impl TensorSource + ?Sized),
    config: &ModelConfig,
    folder: impl AsRef<Path>,
    options: &SaveOptions,
) -> Result<()> {
    if let Some(table) = config.tied_table()
        && source.entries().iter().any(|entry| entry.name == HEAD_TABLE)
    {
        let why = format!(
            "got a tensor {HEAD_TABLE} with a head that is tied to {table}, wanted LoraConfig::merged_config"
        );
        return Err(Error::invalid("save", why));
    }
    write_folder(source, config, folder.as_ref(), options, |dtype| config.to_json(dtype))
}

/// [`save_from`] by a layout, with the `config.json` for the first tensor's dtype.
pub(super) fn write_folder(
    source: &(impl TensorSource + ?Sized),
    layout: &impl Layout,
    folder: &Path,
    options: &SaveOptions,
    config: impl FnOnce(DType) -> Value,
) -> Result<()> {
    let files = InFiles::new(source, layout)?;
    let entries: Vec<TensorEntry> =
        files.0.iter().map(|(entry, _)| options.converted(entry.clone())).collect();
    let dtype = entries.first().map_or(DType::F32, |entry| entry.dtype);
    write_weights(folder, &entries, options, |number| files.tensor(source, number))?;
    write_json(&folder.join(CONFIG), &config(dtype))
}

/// Writes the `config.json` of a model whose weights are of this dtype.
///
/// # Errors
/// If it cannot be written.
pub fn save_config(config: &ModelConfig, dtype: DType, folder: impl AsRef<Path>) -> Result<()> {
    write_json(&folder.as_ref().join(CONFIG), &config.to_json(dtype))
}

/// Whether a folder has a model's weights in files that [`load_model`](super::load_model) reads.
pub fn has_weights(folder: impl AsRef<Path>) -> bool {
    [WEIGHTS, INDEX].iter().any(|name| folder.as_ref().join(name).is_file())
}

/// Whole tensors by the parameters' names, such as their gradients, as a file has them: under its names, transposed and joined as there.
///
/// # Errors
/// If a tensor has not the shape of its parameter.
pub fn file_tensors(tensors: Vec<(String, Tensor)>, config: &ModelConfig) -> Result<Vec<(String, Tensor)>> {
    as_in_files(tensors, config)
}

/// Tensors by the model's names, as files have them.
pub(super) fn as_in_files(
    tensors: Vec<(String, Tensor)>,
    layout: &impl Layout,
) -> Result<Vec<(String, Tensor)>> {
    let files = InFiles::new(&tensors[..], layout)?;
    let tensor = |(number, (entry, _)): (usize, &(TensorEntry, Vec<Piece>))| {
        Ok((entry.name.clone(), files.tensor(&tensors[..], number)?))
    };
    files.0.iter().enumerate().map(tensor).collect()
}

/// The tensors of files, each with the pieces of the model's tensors that it consists of.
struct InFiles(Vec<(TensorEntry, Vec<Piece>)>);

/// Rows of a tensor of the model.
struct Piece {
    of: String,
    /// How many the tensor has, and which of them, after it is transposed if it is.
    all: usize,
    at: Range<usize>,
    transposed: bool,
    /// Where they are in the tensor of the file.
    rows: Rows,
}

impl InFiles {
    fn new(source: &(impl TensorSource + ?Sized), layout: &impl Layout) -> Result<InFiles> {
        let (mut files, mut places): (Vec<(TensorEntry, Vec<Piece>)>, _) = (Vec::new(), BTreeMap::new());
        for TensorEntry { name: of, dtype, mut shape } in source.entries() {
            let Stored { names, rows, transposed } = layout.stored(&of);
            let all = shape.first().copied().unwrap_or(1);
            if transposed {
                shape.reverse();
            }
            let each = shape.first().copied().unwrap_or(1) / names.len();
            for (number, name) in names.into_iter().enumerate() {
                if let Some(first) = shape.first_mut() {
                    *first = each;
                }
                let at = number * each..(number + 1) * each;
                let piece = Piece { of: of.clone(), all, at, transposed, rows };
                let place = *places.entry(name.clone()).or_insert(files.len());
                match files.get_mut(place) {
                    None => files.push((TensorEntry { name, dtype, shape: shape.clone() }, vec![piece])),
                    Some((entry, pieces)) => {
                        entry.shape.iter_mut().take(1).for_each(|rows| *rows += each);
                        pieces.push(piece);
                    }
                }
            }
        }
        files.iter_mut().for_each(|(_, pieces)| pieces.sort_by_key(|piece| piece.rows.place()));
        Ok(InFiles(files))
    }

    /// The tensor of that number.
    fn tensor(&self, source: &(impl TensorSource + ?Sized), number: usize) -> Result<Tensor> {
        let pieces = &self.0[number].1;
        let tensors: Vec<Tensor> = pieces.iter().map(|piece| piece.read(source)).collect::<Result<_>>()?;
        pieces.first().map_or(Rows::All, |piece| piece.rows).join(&tensors)
    }
}

impl Piece {
    fn read(&self, source: &(impl TensorSource + ?Sized)) -> Result<Tensor> {
        if !self.transposed {
            return source.rows(&self.of, self.at.clone());
        }
        let whole = source.rows(&self.of, 0..self.all)?.transpose(0, 1)?;
        Ok(whole.narrow(0, self.at.start, self.at.len())?)
    }
}

impl SaveOptions {
    /// A tensor as the files have it.
    fn converted(&self, entry: TensorEntry) -> TensorEntry {
        let dtype = self.dtype.filter(|_| entry.dtype.is_float()).unwrap_or(entry.dtype);
        TensorEntry { dtype, ..entry }
    }

    /// The numbers of the tensors of each file.
    fn shards(&self, entries: &[TensorEntry]) -> Vec<Range<usize>> {
        let (mut shards, mut bytes): (Vec<Range<usize>>, _) = (Vec::new(), 0_usize);
        for (number, entry) in entries.iter().enumerate() {
            bytes = bytes.saturating_add(entry.bytes());
            match shards.last_mut() {
                Some(shard) if bytes <= self.shard_bytes => shard.end = number + 1,
                _ => {
                    bytes = entry.bytes();
                    shards.push(number..number + 1);
                }
            }
        }
        if shards.is_empty() {
            shards.push(0..0);
        }
        shards
    }
}

/// Writes tensors into one file, or into several with their index. `tensor` gets a tensor's number, and need not have its entry's dtype.
fn write_weights(
    folder: &Path,
    entries: &[TensorEntry],
    options: &SaveOptions,
    mut tensor: impl FnMut(usize) -> Result<Tensor>,
) -> Result<()> {
    if let Some(dtype) = options.dtype.filter(|dtype| !dtype.is_float()) {
        return Err(Error::invalid("save", format!("got the dtype {dtype}, wanted a floating-point one")));
    }
    std::fs::create_dir_all(folder).map_err(|e| phalanx_tensor::Error::file(folder, e))?;
    let shards = options.shards(entries);
    let name = |number: usize| match shards.len() {
        1 => WEIGHTS.to_string(),
        all => format!("model-{:05}-of-{all:05}.safetensors", number + 1),
    };
    let before = Shards::of(folder);
    let is_one = shards.len() == 1;
    if !is_one {
        // Without it the folder cannot be taken for whole while old files are replaced.
        remove(&folder.join(INDEX))?;
    }
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut map = Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let of_shard = entries[shard.clone()].to_vec();
        map.extend(of_shard.iter().map(|entry| (entry.name.clone(), name(number).into())));
        write_safetensors(folder.join(name(number)), of_shard, &metadata, |at| {
            let (number, tensor) = (shard.start + at, tensor(shard.start + at)?);
            Ok::<_, Error>(kernels::cast(&tensor, entries[number].dtype)?)
        })?;
    }
    if !is_one {
        let size: usize = entries.iter().map(TensorEntry::bytes).sum();
        write_json(&folder.join(INDEX), &json!({"metadata": {"total_size": size}, "weight_map": map}))?;
    }
    // What is read of a folder first goes last.
    let now: BTreeSet<String> = (0..shards.len()).map(name).collect();
    remove(&folder.join(if is_one { INDEX } else { WEIGHTS }))?;
    before.0.difference(&now).try_for_each(|name| remove(&folder.join(name)))
}

/// The files that a folder's index names, if they are called as one of several is.
struct Shards(BTreeSet<String>);

impl Shards {
    fn of(folder: &Path) -> Shards {
        let text = std::fs::read_to_string(folder.join(INDEX)).unwrap_or_default();
        let index: Value = serde_json::from_str(&text).unwrap_or_default();
        let is_shard = |name: &&str| {
            let number = |part: &str| part.len() == 5 && part.bytes().all(|byte| byte.is_ascii_digit());
            let inner = name.strip_prefix("model-").and_then(|name| name.strip_suffix(".safetensors"));
            inner.and_then(|inner| inner.split_once("-of-")).is_some_and(|(a, b)| number(a) && number(b))
        };
        let names = index["weight_map"].as_object().into_iter().flat_map(Map::values);
        Shards(names.filter_map(Value::as_str).filter(is_shard).map(String::from).collect())
    }
}

/// Removes a file, if it is there.
fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(phalanx_tensor::Error::file(path, e).into())
        }
        _ => Ok(()),
    }
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::invalid(CONFIG, e.to_string()))?;
    Ok(atomic::write(path, |file| file.write_all(text.as_bytes()).and_then(|()| file.write_all(b"\n")))?)
}

/// Copies a model's folder with its weights in another dtype or in files of another size. One tensor at a time is in memory. All of
/// `config.json` stays but the dtype, and so do the other files beside it, such as the tokenizer's; weights in other formats are not copied.
///
/// # Errors
/// If the two are one folder, `from` is not a model's folder, or a file cannot be read or written.
pub fn convert_folder(from: impl AsRef<Path>, to: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let path = from.join(CONFIG);
    let mut config = parse_fields(&read_text(&path)?, &path)?;
    let files = Files::open(from)?;
    std::fs::create_dir_all(to).map_err(|e| phalanx_tensor::Error::file(to, e))?;
    if same(from, to) {
        return Err(Error::invalid(
            "convert_folder",
            format!("got {} twice, wanted two folders", from.display()),
        ));
    }
    let (mut entries, mut places) = (Vec::new(), Vec::new());
    for file in &files.0 {
        for name in file.names() {
            entries.push(options.converted(TensorEntry::new(name, file.dtype(name)?, file.shape(name)?)));
            places.push((file, name));
        }
    }
    write_weights(to, &entries, options, |number| {
        let (file, name) = places[number];
        Ok(file.tensor(name, Device::CPU)?)
    })?;
    for path in beside(from)? {
        let copy = to.join(path.file_name().unwrap_or_default());
        std::fs::copy(&path, &copy).map_err(|e| phalanx_tensor::Error::file(&copy, e))?;
    }
    if let Some(dtype) = options.dtype {
        // transformers 5 has another key than those before it.
        let keys: Vec<&str> =
            ["dtype", "torch_dtype"].into_iter().filter(|key| config.contains_key(*key)).collect();
        for key in if keys.is_empty() { vec!["torch_dtype"] } else { keys } {
            config.insert(key.into(), dtype_name(dtype).into());
        }
    }
    write_json(&to.join(CONFIG), &Value::Object(config))
}

/// Gives the `config.json` of a folder what that of another folder says, of whose model this one is a further trained one: all of it but the
/// dtype, if both say the same model; else the fields that this one leaves open, such as the numbers of special tokens.
///
/// # Errors
/// If a file cannot be read or written.
pub fn keep_settings(from: impl AsRef<Path>, folder: impl AsRef<Path>) -> Result<()> {
    let read = |folder: &Path| parse_fields(&read_text(&folder.join(CONFIG))?, &folder.join(CONFIG));
    let model = |fields: &Map<String, Value>| {
        ModelConfig::parse(&Value::Object(fields.clone()).to_string(), &folder.as_ref().join(CONFIG))
    };
    let (mut theirs, mut own) = (read(from.as_ref())?, read(folder.as_ref())?);
    let wanted = model(&own)?;
    if model(&theirs).is_ok_and(|config| config == wanted) {
        ["torch_dtype", "dtype"].iter().for_each(|key| drop(theirs.remove(*key)));
        theirs.extend(own.remove_entry("dtype"));
        own = theirs;
    } else {
        let mut more = own.clone();
        for (name, value) in theirs.into_iter().filter(|(name, _)| own.get(name).is_none_or(Value::is_null)) {
            more.insert(name, value);
        }
        if model(&more).is_ok_and(|config| config == wanted) {
            own = more;
        }
    }
    write_json(&folder.as_ref().join(CONFIG), &Value::Object(own))
}

fn same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// A folder's files that are no weights and not `config.json`.
fn beside(folder: &Path) -> Result<Vec<PathBuf>> {
    let wrong = |e| phalanx_tensor::Error::file(folder, e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let weights = [
            ".safetensors",
            ".safetensors.index.json",
            ".bin",
            ".bin.index.json",
            ".pt",
            ".pth",
            ".gguf",
            ".h5",
        ];
        if path.is_file()
            && name != CONFIG
            && !name.starts_with('.')
            && !weights.iter().any(|end| name.ends_with(end))
        {
            found.push(path);
        }
    }
    Ok(found)
}
