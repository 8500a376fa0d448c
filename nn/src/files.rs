//! State dicts, complete or partial, and models in one file: [`state_dict`], [`load_state_dict`], [`save`], [`load`].
//!
//! The file is safetensors, with the names of the [state dict](crate::state_dict), as PyTorch's `safetensors.torch` writes and reads
//! it. For a Hugging Face folder see [`models::load_model`](crate::models::load_model); for a model that is spread over ranks,
//! the checkpoints of `phalanx::parallel`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use phalanx_tensor::io::{SafeTensors, save_safetensors};
use phalanx_tensor::{Device, Tensor};

use crate::{Entry, Error, Mismatch, Optimizer, Parameters, Result, Rule};

/// How tensors are loaded into a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// If set, a missing, an unknown or a misshaped tensor is an error. Otherwise the tensors that fit are loaded,
    /// all others stay as they are, and the result names them.
    pub strict: bool,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions { strict: true }
    }
}

/// Writes all parameters and buffers of a model into one safetensors file. A reader finds the old file or the new one, never
/// a part.
///
/// ```
/// use phalanx_nn::tensor::{DType, Device};
/// use phalanx_nn::{LinearConfig, LoadOptions, Scope, load, load_with, save};
/// let path = std::env::temp_dir().join(format!("phalanx-doc-{}.safetensors", std::process::id()));
/// let model = |seed| LinearConfig::new(3, 2).init(&Scope::new(seed, DType::F32, Device::CPU));
/// save(&model(1)?, &path)?;
/// load(&model(2)?, &path)?; // now equal to the first
///
/// // A model without a bias: tensors that do not fit are skipped and named.
/// let other = LinearConfig::new(3, 2).with_bias(false).init(&Scope::new(1, DType::F32, Device::CPU))?;
/// let left = load_with(&other, &path, LoadOptions { strict: false })?;
/// assert_eq!(left.unexpected, ["bias"]);
/// # std::fs::remove_file(&path).ok();
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
///
/// # Errors
/// If a parameter is a part of one that is spread over ranks, or its values were released; if two have one path; if the
/// model has no elements (`meta`), or the file cannot be written. Then the file stays as it was.
pub fn save(model: &(impl Parameters + ?Sized), path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let mut spread = None;
    model.visit("", &mut |name, entry| {
        if let (Entry::Parameter(p), None) = (entry, &spread)
            && (!p.part().is_whole() || p.tensor().numel() != p.part().extent.iter().product::<usize>())
        {
            spread = Some(name.to_string());
        }
    });
    if let Some(name) = spread {
        let why = format!(
            "cannot write {}: {name:?} is spread over ranks, and this rank has a part of it; use the checkpoints of \
             `phalanx::parallel`, or gather it first",
            path.display()
        );
        return Err(Error::invalid("save", why));
    }
    write(path, &crate::state_dict(model))
}

/// Reads a file that [`save`] or PyTorch has written into the model's parameters and buffers, converted to their dtypes and
/// moved to their devices.
///
/// # Errors
/// If the file cannot be read, or names are missing, not known or of another shape. Then nothing is changed.
pub fn load(model: &(impl Parameters + ?Sized), path: impl AsRef<Path>) -> Result<()> {
    load_with(model, path, LoadOptions::default()).map(drop)
}

/// [`load`] with options. Returns the names that were not loaded.
///
/// # Errors
/// As [`load`]; unless it is strict, only if the file cannot be read, or nothing in it fits.
pub fn load_with(
    model: &(impl Parameters + ?Sized),
    path: impl AsRef<Path>,
    options: LoadOptions,
) -> Result<Mismatch> {
    let file = SafeTensors::open(path)?;
    let what = file.path().display().to_string();
    let names: Vec<String> = file.names().map(String::from).collect();
    let shapes = names.into_iter().map(|name| Ok((name.clone(), file.shape(&name)?.to_vec())));
    let plan = LoadPlan::new(model, shapes.collect::<Result<_>>()?, what, options)?;
    for name in &plan.names {
        file.dtype(name)?;
    }
    // One at a time, so that a large model is not held twice.
    plan.load(model, |name, on| Ok(file.tensor(name, if on.is_meta() { on } else { Device::CPU })?))
}

/// Every parameter and buffer by name, as PyTorch's `state_dict`. The tensors are the module's own, not copies. The tensor of a
/// parameter that is sharded over ranks has no elements here; reading or saving it is an error that names the remedy
/// ([`Tensor::why_withheld`]). A parameter [in 8-bit blocks](crate::Parameter::hold_in_int8) or [in panels](crate::Parameter::pack) has new floats; if memory is short for them,
/// it has no elements either. See [`save`](crate::save) for a file.
pub fn state_dict(module: &(impl Parameters + ?Sized)) -> Vec<(String, Tensor)> {
    let mut entries = Vec::new();
    let values = |entry: Entry<'_>| match entry {
        Entry::Parameter(p) => p.values().unwrap_or_else(|_| p.tensor()),
        Entry::Buffer(b) => b.tensor(),
    };
    module.visit("", &mut |path, entry| entries.push((path.into(), values(entry))));
    entries
}

/// Copies saved tensors into the parameters and buffers of those names, converted to their dtypes and moved to their
/// devices. See [`load_state_dict_with`] for a state dict that fits in part only.
///
/// # Errors
/// If a name is missing, unknown or given twice, a shape differs, or a parameter's values are on other ranks. Then nothing is changed.
pub fn load_state_dict(
    module: &(impl Parameters + ?Sized),
    entries: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<()> {
    load_state_dict_with(module, entries, LoadOptions::default()).map(drop)
}

/// [`load_state_dict`](crate::load_state_dict) with options. Returns the names that were not loaded.
///
/// # Errors
/// If a name comes twice, a tensor has no elements to copy (`meta`), nothing fits, or, if it is strict, names are missing, not
/// known or of another shape. Then nothing is changed.
pub fn load_state_dict_with(
    module: &(impl Parameters + ?Sized),
    entries: impl IntoIterator<Item = (String, Tensor)>,
    options: LoadOptions,
) -> Result<Mismatch> {
    let mut given: HashMap<String, Tensor> = HashMap::new();
    for (name, tensor) in entries {
        if given.contains_key(&name) {
            return Err(Error::invalid("state dict", format!("{name:?} comes twice")));
        }
        given.insert(name, tensor);
    }
    let shapes = given.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect();
    let plan = LoadPlan::new(module, shapes, "state dict".into(), options)?;
    let unreadable = |name: &&String| given.get(*name).is_some_and(|t| t.device().is_meta()) && !plan.on_meta;
    if let Some(name) = plan.names.iter().find(unreadable) {
        return Err(Error::invalid(
            "state dict",
            format!("{name:?} is on a meta device, which has no elements"),
        ));
    }
    plan.load(module, |name, _| {
        given.get(name).cloned().ok_or_else(|| Error::invalid("state dict", format!("{name:?} is gone")))
    })
}

/// Which of the given tensors fit a module.
struct LoadPlan {
    /// The names that fit.
    names: Vec<String>,
    /// Everything else.
    left: Mismatch,
    /// Whether the module has no elements.
    on_meta: bool,
}

impl LoadPlan {
    /// Compares names and shapes. It is an error if the options are strict and a tensor does not fit.
    fn new(
        module: &(impl Parameters + ?Sized),
        mut given: HashMap<String, Vec<usize>>,
        what: String,
        options: LoadOptions,
    ) -> Result<LoadPlan> {
        let mut plan = LoadPlan { names: Vec::new(), left: Mismatch::default(), on_meta: true };
        let mut withheld = None;
        module.visit("", &mut |path, entry| {
            let held = entry.tensor();
            let is_held = matches!(entry, Entry::Parameter(p) if p.is_in_int8() || p.is_packed());
            let why = held.why_withheld().filter(|_| !is_held);
            withheld = withheld.take().or_else(|| Some((path.to_string(), why?)));
            plan.on_meta &= held.device().is_meta();
            match given.remove(path) {
                None => plan.left.missing.push(path.into()),
                Some(shape) if shape != held.shape() => {
                    plan.left.misshaped.push((path.into(), shape, held.shape().into()));
                }
                Some(_) => plan.names.push(path.into()),
            }
        });
        if let Some((path, why)) = withheld {
            return Err(Error::invalid(what, format!("{path}: {why}")));
        }
        plan.left.unexpected = given.into_keys().collect();
        plan.left.unexpected.sort();
        if options.strict {
            plan.left.clone().check(&what)?;
        } else if plan.names.is_empty() {
            plan.left.clone().check(&format!("{what}: nothing fits"))?;
        }
        Ok(plan)
    }

    /// Loads the tensors that fit. `read` returns the values of a name for a tensor on a device.
    fn load(
        self,
        module: &(impl Parameters + ?Sized),
        read: impl Fn(&str, Device) -> Result<Tensor>,
    ) -> Result<Mismatch> {
        let mut names = self.names.iter().peekable();
        let mut done = Ok(());
        module.visit("", &mut |path, entry| {
            if done.is_ok() && names.next_if(|name| *name == path).is_some() {
                done = read(path, entry.tensor().device()).and_then(|values| entry.load(&values));
            }
        });
        done.map(|()| self.left)
    }
}

impl<R: Rule> Optimizer<R> {
    /// Writes its [state](Optimizer::state_dict) into one safetensors file, atomically.
    ///
    /// # Errors
    /// If the state has no elements (`meta`), or the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), &self.state_dict()?)
    }

    /// Restores the state from a file that [`Optimizer::save`] has written, bit for bit. Rates and decays are those that the
    /// groups have, not the file's.
    ///
    /// # Errors
    /// If the file cannot be read, or tensors are missing, not known or of another shape; then nothing is changed.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let file = SafeTensors::open(path)?;
        let entry = |name: &str| Ok((name.to_string(), file.tensor(name, Device::CPU)?));
        let entries: Vec<(String, Tensor)> = file.names().map(entry).collect::<Result<_>>()?;
        self.load_state_dict(entries)
    }
}

fn write(path: &Path, entries: &[(String, Tensor)]) -> Result<()> {
    // PyTorch's readers require it.
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let named = entries.iter().map(|(name, tensor)| (name.as_str(), tensor));
    Ok(save_safetensors(path, named, &metadata)?)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use phalanx_autograd::Var;
    use phalanx_tensor::DType;

    use super::*;
    use crate::{
        AdamW, BatchNormConfig, Group, LinearConfig, Module, Parameter, Scope, Sequential, SequentialConfig,
        Shard, load_state_dict, state_dict,
    };

    /// A file's name that is removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            Scratch(std::env::temp_dir().join(format!("phalanx-{name}-{}.safetensors", std::process::id())))
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn model(seed: u64, outputs: usize, dtype: DType) -> Sequential {
        let layers = SequentialConfig::new().with(LinearConfig::new(3, 4)).with(BatchNormConfig::new(4));
        layers.with(LinearConfig::new(4, outputs)).init(&Scope::new(seed, dtype, Device::CPU)).unwrap()
    }

    fn values(model: &Sequential) -> Vec<(String, Vec<f64>)> {
        let wide = |t: &Tensor| phalanx_kernels::cast(t, DType::F64).unwrap().to_vec().unwrap();
        state_dict(model).iter().map(|(name, t)| (name.clone(), wide(t))).collect()
    }

    #[test]
    fn a_model_comes_back_from_one_file_in_another_dtype_too() {
        let file = Scratch::new("whole");
        let first = model(1, 2, DType::F32);
        first.forward(&Var::from_slice(&[0.5f32; 6], &[2, 3], Device::CPU).unwrap()).unwrap();
        save(&first, &file.0).unwrap();
        for dtype in [DType::F32, DType::F64] {
            let other = model(2, 2, dtype);
            assert_ne!(values(&other), values(&first));
            load(&other, &file.0).unwrap();
            assert_eq!(values(&other), values(&first), "buffers too");
        }
        let dynamic: &dyn Parameters = &first;
        save(dynamic, &file.0).unwrap();
        load(dynamic, &file.0).unwrap();
    }

    #[test]
    fn what_does_not_fit_is_an_error_that_changes_nothing_or_is_left_and_told() {
        let file = Scratch::new("head");
        save(&model(1, 2, DType::F32), &file.0).unwrap();
        let other = model(2, 5, DType::F32);
        let before = values(&other);
        let error = load(&other, &file.0).unwrap_err().to_string();
        assert!(error.contains("2.weight (got [2, 4], wanted [5, 4])"), "{error}");
        assert_eq!(values(&other), before);
        let left = load_with(&other, &file.0, LoadOptions { strict: false }).unwrap();
        let misshaped: Vec<&str> = left.misshaped.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(
            (misshaped, left.missing.len(), left.unexpected.len()),
            (vec!["2.weight", "2.bias"], 0, 0)
        );
        let after = values(&other);
        assert_eq!(after[0], values(&model(1, 2, DType::F32))[0], "what fits is loaded");
        assert_eq!(after[after.len() - 2..], before[before.len() - 2..], "the rest is as it was");
    }

    #[test]
    fn a_state_dict_may_have_more_and_less() {
        let (one, two) = (model(1, 2, DType::F32), model(2, 2, DType::F32));
        let mut entries = state_dict(&one);
        let (_, moved) = entries.remove(0);
        entries.push(("extra".into(), moved));
        let refused = load_state_dict(&two, entries.clone()).err().unwrap().to_string();
        assert!(refused.contains("missing: 0.weight; unexpected: extra"), "{refused}");
        let left = load_state_dict_with(&two, entries.clone(), LoadOptions { strict: false }).unwrap();
        assert_eq!(
            (left.missing, left.unexpected),
            (vec!["0.weight".to_string()], vec!["extra".to_string()])
        );
        assert_eq!(values(&two)[1..], values(&one)[1..]);
        let odd = entries.iter().map(|(name, values)| (format!("module.{name}"), values.clone()));
        let error = load_state_dict_with(&two, odd, LoadOptions { strict: false }).unwrap_err().to_string();
        assert!(error.contains("nothing fits") && error.contains("module.0.bias"), "{error}");
        entries.push(entries[0].clone());
        let error =
            load_state_dict_with(&two, entries, LoadOptions { strict: false }).unwrap_err().to_string();
        assert!(error.contains("\"0.bias\" comes twice"), "{error}");
    }

    #[test]
    fn tensors_without_elements_are_refused_before_anything_is_changed() {
        let two = model(2, 2, DType::F32);
        let before = values(&two);
        let mut entries = state_dict(&model(1, 2, DType::F32));
        let last = entries.last_mut().unwrap();
        last.1 = Tensor::zeros(last.1.shape(), DType::F32, Device::Meta(0)).unwrap();
        let error = load_state_dict(&two, entries).unwrap_err().to_string();
        assert!(error.contains("2.bias") && error.contains("meta"), "{error}");
        assert_eq!(values(&two), before);
    }

    #[test]
    fn a_part_of_a_parameter_is_not_saved_as_if_it_were_the_whole() {
        let half = phalanx_tensor::Window { global: [4].as_slice().into(), offset: [2].as_slice().into() };
        let part = Shard { window: half, extent: [2].as_slice().into() };
        let tensor = Tensor::from_slice(&[1f32, 2.0], &[2], Device::CPU).unwrap();
        let parameter = Parameter::shard("w", tensor, part).unwrap();
        let file = Scratch::new("part");
        let error = save(&parameter, &file.0).unwrap_err().to_string();
        assert!(error.contains("spread over ranks") && !file.0.exists(), "{error}");
        let error = load(&model(1, 2, DType::F32), &file.0).unwrap_err().to_string();
        assert!(error.contains("phalanx-part"), "{error}");
    }

    #[test]
    fn an_optimizer_goes_on_from_its_file_with_the_same_bits() {
        let file = Scratch::new("optimizer");
        let train = |model: &Sequential, optimizer: &mut Optimizer<AdamW>, steps: usize| {
            for _ in 0..steps {
                let x = Var::from_slice(&[0.5f32, -1.0, 2.0, 0.1, 0.2, 0.3], &[2, 3], Device::CPU).unwrap();
                optimizer.zero_grad().unwrap();
                model.forward(&x).unwrap().square().unwrap().mean_all().unwrap().backward().unwrap();
                optimizer.step().unwrap();
            }
        };
        let adam =
            |model: &Sequential| AdamW::default().init(vec![Group::new(model.parameters(), 0.1)]).unwrap();
        let whole = model(1, 2, DType::F32);
        let mut optimizer = adam(&whole);
        train(&whole, &mut optimizer, 2);
        optimizer.save(&file.0).unwrap();
        let resumed = model(7, 2, DType::F32);
        load_state_dict(&resumed, state_dict(&whole)).unwrap();
        let mut again = adam(&resumed);
        again.load(&file.0).unwrap();
        train(&whole, &mut optimizer, 2);
        train(&resumed, &mut again, 2);
        assert_eq!(values(&resumed), values(&whole));
    }
}
