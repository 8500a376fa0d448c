//! NumPy's npy format: a Python dictionary of dtype, order and shape, then the bytes.
//!
//! ```text
//! "\x93NUMPY" | u8 version, u8 0 | u16 (version 1) or u32 (2, 3) header length
//! {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n | bytes
//! ```
//!
//! Source: NumPy, `numpy.lib.format`.

use std::io::{self, Write};
use std::path::Path;

use super::{Map, atomic, bytes_of};
use crate::{DType, Device, Error, Result, Tensor};

const MAGIC: &[u8] = b"\x93NUMPY";

/// Reads an npy file. Arrays in Fortran order come out contiguous like the others. The file must not be changed in
/// place meanwhile.
///
/// # Errors
/// [`Error::File`] if the file cannot be read, is not an npy file through and through, or holds a dtype that is
/// none of ours or big-endian.
pub fn load_npy(path: impl AsRef<Path>, device: Device) -> Result<Tensor> {
    let path = path.as_ref();
    let map = Map::open(path)?;
    let (header, data) = parse(map.bytes()).map_err(|why| Error::file(path, why))?;
    header.tensor(data, device)
}

/// [`load_npy`] of a file that must hold `dtype`.
///
/// # Errors
/// As [`load_npy`]; [`Error::File`] if the file holds another dtype.
pub fn load_npy_as(path: impl AsRef<Path>, dtype: DType, device: Device) -> Result<Tensor> {
    let path = path.as_ref();
    let map = Map::open(path)?;
    let (header, data) = parse(map.bytes()).map_err(|why| Error::file(path, why))?;
    if header.dtype != dtype {
        return Err(Error::file(path, format!("holds dtype {}, wanted {dtype}", header.dtype)));
    }
    header.tensor(data, device)
}

/// [`load_npy`] from memory.
///
/// # Errors
/// As [`load_npy`], with [`Error::Invalid`] for what is wrong with the bytes.
pub fn read_npy(bytes: &[u8], device: Device) -> Result<Tensor> {
    let (header, data) = parse(bytes).map_err(|why| Error::invalid("read_npy", why))?;
    header.tensor(data, device)
}

/// Writes an npy file, atomically (see [`atomic::write`]), in Fortran order if the tensor lies so in memory.
///
/// # Errors
/// If the tensor is bf16, which the format lacks, or has no elements to read (`meta`), or the file cannot be
/// written.
pub fn save_npy(path: impl AsRef<Path>, tensor: &Tensor) -> Result<()> {
    atomic::write(path, |file| write_npy(file, tensor).map_err(io::Error::other))
}

/// [`save_npy`] to any writer.
///
/// # Errors
/// As [`save_npy`]; a failing writer is an [`Error::Invalid`].
pub fn write_npy(writer: &mut (impl Write + ?Sized), tensor: &Tensor) -> Result<()> {
    let Some(descr) = descr_of(tensor.dtype()) else {
        return Err(Error::dtype("save_npy", tensor.dtype(), "a dtype that npy has: all but bf16"));
    };
    let reversed: Vec<usize> = (0..tensor.rank()).rev().collect();
    let transposed = tensor.permute(&reversed)?;
    let fortran = transposed.is_contiguous() && !tensor.is_contiguous();
    let header = header(descr, fortran, tensor.shape());
    let tensor = if fortran { &transposed } else { tensor };
    let written = tensor.with_bytes("save_npy", |bytes| {
        writer.write_all(&header)?;
        writer.write_all(bytes)
    })?;
    written.map_err(|e| Error::invalid("save_npy", e.to_string()))
}

/// Everything before the data, which begins at a multiple of 64 bytes.
fn header(descr: &str, fortran: bool, shape: &[usize]) -> Vec<u8> {
    let order = if fortran { "True" } else { "False" };
    let sizes: String = shape.iter().map(|n| format!("{n}, ")).collect();
    let sizes = if shape.len() == 1 { sizes.trim_end() } else { sizes.trim_end_matches(", ") };
    let text = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': ({sizes}), }}");
    let before = |version: u8| MAGIC.len() + 2 + if version == 1 { 2 } else { 4 };
    let length = |version| (before(version) + text.len() + 1).next_multiple_of(64) - before(version);
    let version = if length(1) <= usize::from(u16::MAX) { 1 } else { 2 };
    let length = length(version);
    let mut out = MAGIC.to_vec();
    out.extend([version, 0]);
    match version {
        1 => out.extend((length as u16).to_le_bytes()),
        _ => out.extend((length as u32).to_le_bytes()),
    }
    out.extend(text.as_bytes());
    out.resize(out.len() + length - 1 - text.len(), b' ');
    out.push(b'\n');
    out
}

struct Header {
    dtype: DType,
    fortran: bool,
    shape: Vec<usize>,
}

impl Header {
    fn tensor(&self, data: &[u8], device: Device) -> Result<Tensor> {
        if !self.fortran {
            return Tensor::from_bytes(data, &self.shape, self.dtype, device);
        }
        let transposed: Vec<usize> = self.shape.iter().rev().copied().collect();
        let reversed: Vec<usize> = (0..transposed.len()).rev().collect();
        Tensor::from_bytes(data, &transposed, self.dtype, device)?.permute(&reversed)?.contiguous()
    }
}

/// The header and exactly the bytes of the elements.
fn parse(file: &[u8]) -> Result<(Header, &[u8]), String> {
    let rest = file.strip_prefix(MAGIC).ok_or("not an npy file: it does not begin with \\x93NUMPY")?;
    let cut = || "not a valid npy file: it ends inside the header".to_string();
    let ([major, _], rest) = rest.split_first_chunk::<2>().ok_or_else(cut)?;
    let (length, rest) = match major {
        1 => {
            let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
            (usize::from(u16::from_le_bytes(*length)), rest)
        }
        2 | 3 => {
            let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
            (u32::from_le_bytes(*length) as usize, rest)
        }
        _ => return Err(format!("npy version {major}, supported are 1, 2 and 3")),
    };
    let (text, data) = rest.split_at_checked(length).ok_or_else(cut)?;
    let text = text.iter().map(|&b| char::from(b)).collect::<Vec<char>>();
    let header = Dictionary { text: &text }.header().map_err(|why| format!("not a valid npy file: {why}"))?;
    if bytes_of(&header.shape, header.dtype) != Some(data.len()) {
        let (shape, dtype) = (&header.shape, header.dtype);
        return Err(format!(
            "not a valid npy file: {} bytes of data for shape {shape:?} of {dtype}",
            data.len()
        ));
    }
    Ok((header, data))
}

/// A parser of the header's Python literals.
struct Dictionary<'a> {
    text: &'a [char],
}

impl Dictionary<'_> {
    fn header(mut self) -> Result<Header, String> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        self.expect('{')?;
        while !self.take('}') {
            match self.string()?.as_str() {
                key @ ("descr" | "fortran_order" | "shape") => {
                    self.expect(':')?;
                    match key {
                        "descr" => descr = Some(self.string()?),
                        "shape" => shape = Some(self.tuple()?),
                        _ => fortran = Some(self.boolean()?),
                    }
                }
                key => return Err(format!("unknown key {key:?} in the header")),
            }
            if !self.take(',') {
                self.expect('}')?;
                break;
            }
        }
        self.space();
        if !self.text.is_empty() {
            return Err("the header goes on after its dictionary".into());
        }
        let (Some(descr), Some(fortran), Some(shape)) = (descr, fortran, shape) else {
            return Err("the header lacks descr, fortran_order or shape".into());
        };
        Ok(Header { dtype: dtype_of(&descr)?, fortran, shape })
    }

    fn space(&mut self) {
        while let [first, rest @ ..] = self.text
            && first.is_ascii_whitespace()
        {
            self.text = rest;
        }
    }

    fn take(&mut self, wanted: char) -> bool {
        self.space();
        match self.text {
            [first, rest @ ..] if *first == wanted => {
                self.text = rest;
                true
            }
            _ => false,
        }
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        if self.take(wanted) {
            return Ok(());
        }
        let got: String = self.text.iter().take(20).collect();
        Err(format!("wanted {wanted:?} in the header, got {got:?}"))
    }

    /// In either kind of quotes, without escapes, which no key and no plain dtype has.
    fn string(&mut self) -> Result<String, String> {
        let quote = if self.take('"') { '"' } else { '\'' };
        if quote == '\'' {
            self.expect(quote)?;
        }
        let end = self.text.iter().position(|&c| c == quote).ok_or("a string in the header does not end")?;
        let text = self.text[..end].iter().collect();
        self.text = &self.text[end + 1..];
        Ok(text)
    }

    fn boolean(&mut self) -> Result<bool, String> {
        match self.word().as_str() {
            "True" => Ok(true),
            "False" => Ok(false),
            word => Err(format!("wanted True or False in the header, got {word:?}")),
        }
    }

    fn tuple(&mut self) -> Result<Vec<usize>, String> {
        let mut sizes = Vec::new();
        self.expect('(')?;
        while !self.take(')') {
            let word = self.word();
            // Python 2 wrote its long integers with an L.
            let size = word.strip_suffix('L').unwrap_or(&word).parse();
            sizes.push(size.map_err(|_| format!("wanted a size in the header, got {word:?}"))?);
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(sizes)
    }

    fn word(&mut self) -> String {
        self.space();
        let end = self.text.iter().position(|c| !c.is_ascii_alphanumeric()).unwrap_or(self.text.len());
        let (word, rest) = self.text.split_at(end);
        self.text = rest;
        word.iter().collect()
    }
}

fn descr_of(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F64 => "<f8",
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::I64 => "<i8",
        DType::I32 => "<i4",
        DType::U8 => "|u1",
        DType::Bool => "|b1",
        DType::BF16 => return None,
    })
}

fn dtype_of(descr: &str) -> Result<DType, String> {
    // Of single bytes the order says nothing, and `=` is the machine's.
    let plain = match descr.strip_prefix(['=', '|', '<']) {
        Some(rest) => rest,
        None => descr.strip_prefix('>').filter(|rest| rest.ends_with('1')).unwrap_or(descr),
    };
    let found = DType::ALL.into_iter().find(|&d| descr_of(d).is_some_and(|known| &known[1..] == plain));
    found.ok_or_else(|| {
        let known: Vec<_> = DType::ALL.into_iter().filter_map(descr_of).collect();
        format!("dtype {descr:?}, supported are {}", known.join(", "))
    })
}
