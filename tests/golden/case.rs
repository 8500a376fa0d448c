//! The cases: `index.json`, the tensors that it names, and the comparison of results with them.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::LazyLock;

use phalanx::tensor::io::SafeTensors;
use phalanx::{DType, Device, Tensor, kernels};
use serde::Deserialize;
use serde_json::{Map, Value};

/// A folder of cases.
pub struct Set {
    /// The device that the cases are run on.
    pub device: Device,
    pub folder: PathBuf,
    pub cases: Vec<Case>,
    files: RefCell<HashMap<String, Rc<SafeTensors>>>,
}

#[derive(Deserialize)]
struct Index {
    format: u32,
    cases: Vec<Case>,
}

/// One operator call with its expected results.
#[derive(Deserialize)]
pub struct Case {
    pub name: String,
    pub op: String,
    pub file: String,
    pub attrs: Map<String, Value>,
    pub inputs: Vec<Input>,
    pub outputs: Vec<String>,
    pub cotangents: Vec<String>,
    pub grads: Vec<Option<String>>,
    pub rtol: f64,
    pub atol: f64,
}

/// An argument.
#[derive(Deserialize)]
pub struct Input {
    pub name: String,
    pub key: String,
    pub requires_grad: bool,
    pub permute: Option<Vec<usize>>,
}

impl Case {
    /// The file's name without its ending.
    pub fn family(&self) -> String {
        Path::new(&self.file)
            .file_stem()
            .map_or_else(|| self.file.clone(), |s| s.to_string_lossy().into_owned())
    }
}

impl Set {
    /// Reads the index.
    pub fn open(folder: &Path, device: Device) -> Result<Set, String> {
        let path = folder.join("index.json");
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let index: Index = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
        if index.format != 1 {
            return Err(format!("format {} is unknown, wanted 1", index.format));
        }
        Ok(Set { folder: folder.into(), device, cases: index.cases, files: RefCell::default() })
    }

    /// A tensor of the case's file, on the tested device.
    pub fn tensor(&self, case: &Case, key: &str) -> Result<Tensor, String> {
        self.file(&case.file)?.tensor(key, self.device).map_err(|e| e.to_string())
    }

    fn file(&self, name: &str) -> Result<Rc<SafeTensors>, String> {
        if let Some(file) = self.files.borrow().get(name) {
            return Ok(file.clone());
        }
        let file = Rc::new(SafeTensors::open(self.folder.join(name)).map_err(|e| e.to_string())?);
        self.files.borrow_mut().insert(name.into(), file.clone());
        Ok(file)
    }
}

/// The attributes of a call. They record which were read, so that an unknown one is found.
pub struct Attrs<'a> {
    attrs: &'a Map<String, Value>,
    pub read: RefCell<BTreeMap<String, ()>>,
}

impl<'a> Attrs<'a> {
    pub fn new(attrs: &'a Map<String, Value>) -> Attrs<'a> {
        Attrs { attrs, read: RefCell::default() }
    }

    /// The attributes inside the attribute `name`, none if it is absent.
    pub fn nested(&self, name: &str) -> Attrs<'a> {
        static NONE: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
        Attrs::new(self.get(name).and_then(Value::as_object).unwrap_or(&NONE))
    }

    /// The first attribute that was not read.
    pub fn unread(&self) -> Option<String> {
        let read = self.read.borrow();
        self.attrs.iter().find(|(k, v)| !v.is_null() && !read.contains_key(*k)).map(|(k, _)| k.clone())
    }

    /// The value, if present and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(name.into(), ());
        self.attrs.get(name).filter(|v| !v.is_null())
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub fn int(&self, name: &str) -> Option<i64> {
        self.get(name)?.as_i64()
    }

    pub fn int_or(&self, name: &str, default: i64) -> i64 {
        self.int(name).unwrap_or(default)
    }

    pub fn float(&self, name: &str) -> Option<f64> {
        self.get(name)?.as_f64()
    }

    pub fn float_or(&self, name: &str, default: f64) -> f64 {
        self.float(name).unwrap_or(default)
    }

    /// A number, or none where the attribute is there and null.
    pub fn nullable(&self, name: &str, default: f64) -> Option<f64> {
        let null = self.attrs.get(name).is_some_and(Value::is_null);
        (!null).then(|| self.float_or(name, default))
    }

    pub fn bool_or(&self, name: &str, default: bool) -> bool {
        self.get(name).and_then(Value::as_bool).unwrap_or(default)
    }

    pub fn str_or(&self, name: &str, default: &'a str) -> &'a str {
        self.get(name).and_then(Value::as_str).unwrap_or(default)
    }

    /// A list of integers; a single one is a list of one.
    pub fn ints(&self, name: &str) -> Option<Vec<i64>> {
        match self.get(name)? {
            Value::Array(list) => list.iter().map(Value::as_i64).collect(),
            one => Some(vec![one.as_i64()?]),
        }
    }

    /// A list of numbers.
    pub fn floats(&self, name: &str) -> Option<Vec<f64>> {
        self.get(name)?.as_array()?.iter().map(Value::as_f64).collect()
    }

    /// [`Attrs::ints`] that count or measure something.
    pub fn sizes(&self, name: &str) -> Option<Vec<usize>> {
        self.ints(name)?.into_iter().map(|n| usize::try_from(n).ok()).collect()
    }

    /// A number that keeps whether it is an integer.
    pub fn scalar(&self, name: &str) -> Option<phalanx::Scalar> {
        let value = self.get(name)?;
        value.as_i64().map(phalanx::Scalar::Int).or_else(|| value.as_f64().map(phalanx::Scalar::Float))
    }
}

/// `|a - e| <= atol + rtol |e|` everywhere, or both NaN, or equal; shapes and dtypes must agree, integers be equal.
pub fn compare(what: &str, got: &Tensor, want: &Tensor, rtol: f64, atol: f64) -> Result<(), String> {
    if got.shape() != want.shape() || got.dtype() != want.dtype() {
        let form = |t: &Tensor| format!("{:?} {}", t.shape(), t.dtype());
        return Err(format!("{what} is {}, wanted {}", form(got), form(want)));
    }
    let host = |t: &Tensor| t.to_device(Device::CPU, false).map_err(|e| e.to_string());
    let (got, want) = (&host(got)?, &host(want)?);
    if !got.dtype().is_float() {
        let ints = |t: &Tensor| {
            kernels::cast(t, DType::I64).and_then(|t| t.to_vec::<i64>()).map_err(|e| e.to_string())
        };
        let (a, e) = (ints(got)?, ints(want)?);
        return first_bad(
            what,
            got.shape(),
            a.iter().zip(&e).map(|(a, e)| (a == e, a.to_string(), e.to_string())),
        );
    }
    let floats =
        |t: &Tensor| kernels::cast(t, DType::F64).and_then(|t| t.to_vec::<f64>()).map_err(|e| e.to_string());
    let (a, e) = (floats(got)?, floats(want)?);
    let agree =
        |a: f64, e: f64| a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= atol + rtol * e.abs();
    first_bad(
        what,
        got.shape(),
        a.iter().zip(&e).map(|(&a, &e)| (agree(a, e), format!("{a:e}"), format!("{e:e}"))),
    )
}

fn first_bad(
    what: &str,
    shape: &[usize],
    pairs: impl Iterator<Item = (bool, String, String)>,
) -> Result<(), String> {
    let bad: Vec<_> = pairs.enumerate().filter(|(_, (ok, ..))| !ok).collect();
    match bad.first() {
        None => Ok(()),
        Some((at, (_, got, want))) => {
            Err(format!("{what} {shape:?}: {} wrong, the first at {at}: got {got}, wanted {want}", bad.len()))
        }
    }
}
