//! [`Pretrained`]: models other than decoders, whose folders transformers reads and writes.

use std::path::Path;

use phalanx_tensor::{DType, Tensor};
use serde_json::{Map, Value};

use super::hugging_face::{check_elements, load_tensors, read_fields, whole_tensors};
use super::save::{SaveOptions, as_in_files, write_folder};
use super::stored::{Layout, Stored};
use crate::{Error, LoadOptions, Mismatch, Mode, Parameters, Result, Scope};

/// The config of a model that a folder of Hugging Face's `save_pretrained` holds: [`BertConfig`](super::BertConfig),
/// [`VitConfig`](super::VitConfig), [`ResNetConfig`](super::ResNetConfig), or one of your own. [`load_model`](super::load_model) reads
/// decoders.
///
/// ```
/// use phalanx_nn::models::{Pretrained, VitConfig};
/// use phalanx_nn::{Scope, tensor::{DType, Device}};
/// let folder = std::env::temp_dir().join(format!("phalanx-pretrained-{}", std::process::id()));
/// let config = VitConfig { layers: 1, ..VitConfig::new([8, 8], [4, 4], 1, 2, 8, 3) };
/// let scope = Scope::new(1, DType::F32, Device::CPU);
/// config.save(&config.init(&scope)?, &folder)?;
/// let (read, model) = VitConfig::load(&folder, &scope)?;
/// assert_eq!(read, config);
/// model.train();
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
pub trait Pretrained: Sized {
    /// The model. Its buffers' paths and its parameters' names are the same.
    type Model: Parameters;

    /// From the fields of a `config.json`.
    ///
    /// # Errors
    /// What is missing, wrong or not supported, by name.
    fn from_json(fields: &Map<String, Value>) -> Result<Self, String>;

    /// The `config.json` that transformers reads, of weights of that dtype.
    fn to_json(&self, dtype: DType) -> Value;

    /// A new model, in training mode.
    ///
    /// # Errors
    /// If the sizes do not fit each other, or it cannot be allocated.
    fn init(&self, scope: &Scope) -> Result<Self::Model>;

    /// The mode of the whole model.
    fn mode(model: &Self::Model) -> &Mode;

    /// Elements of the matrices. It is a float, since a config may ask for any size.
    fn matrix_elements(&self) -> f64;

    /// The tensors of files whose rows, one after the other, are the parameter or buffer of this name.
    fn file_names(&self, name: &str) -> Vec<String>;

    /// Whether files may have this tensor though the model has no use for it.
    fn is_unused(&self, _stored: &str) -> bool {
        false
    }

    /// Reads a folder's `config.json`.
    ///
    /// # Errors
    /// If it cannot be read, is not valid, or a setting is not supported.
    fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let (fields, path) = read_fields(folder.as_ref())?;
        Self::from_json(&fields).map_err(|why| Error::invalid(path.display().to_string(), why))
    }

    /// Builds the model of a folder, with its weights in the scope's dtype. As after transformers' `from_pretrained`, it is in evaluation
    /// mode, without dropout.
    ///
    /// # Errors
    /// If a file cannot be read, or tensors are missing, unknown or of another shape.
    fn load(folder: impl AsRef<Path>, scope: &Scope) -> Result<(Self, Self::Model)> {
        let config = Self::read(&folder)?;
        check_elements(config.matrix_elements(), folder.as_ref())?;
        let model = config.init(scope)?;
        let _ = config.load_into(&model, folder, LoadOptions::default())?;
        Self::mode(&model).set(false);
        Ok((config, model))
    }

    /// Fills a model of this config from a folder's weights, and returns the names of what was not loaded. If it need not be strict, the
    /// rest of the model stays as it is: so a model gets a new head on another model's encoder.
    ///
    /// # Errors
    /// If a file cannot be read, or nothing fits; if it is strict, if anything does not fit. Then the model is as it was.
    fn load_into(
        &self,
        model: &Self::Model,
        folder: impl AsRef<Path>,
        options: LoadOptions,
    ) -> Result<Mismatch> {
        load_tensors(model, &ByNames(self), folder.as_ref(), true, options)
    }

    /// Writes a folder: weights first, `config.json` last, each file atomically.
    ///
    /// # Errors
    /// If a file cannot be written, the model has no elements (`meta`), or this rank has a part of it.
    fn save(&self, model: &Self::Model, folder: impl AsRef<Path>) -> Result<()> {
        self.save_tensors(whole_tensors(model)?, folder)
    }

    /// [`Pretrained::save`] of whole tensors by the parameters' names and the buffers' paths.
    ///
    /// # Errors
    /// If a file cannot be written, or there are no elements (`meta`).
    fn save_tensors(&self, tensors: Vec<(String, Tensor)>, folder: impl AsRef<Path>) -> Result<()> {
        let options = SaveOptions::default();
        write_folder(&tensors[..], &ByNames(self), folder.as_ref(), &options, |dtype| self.to_json(dtype))
    }

    /// Tensors by the parameters' names, such as their gradients, as a file has them.
    ///
    /// # Errors
    /// If a tensor has not the shape of its parameter.
    fn file_tensors(&self, tensors: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        as_in_files(tensors, &ByNames(self))
    }
}

pub(super) struct ByNames<'a, C>(pub(super) &'a C);

impl<C: Pretrained> Layout for ByNames<'_, C> {
    fn stored(&self, name: &str) -> Stored {
        Stored { names: self.0.file_names(name), ..Stored::whole(name) }
    }

    fn is_known(&self, stored: &str) -> bool {
        self.0.is_unused(stored)
    }
}

/// A name of which the first part that the table has is replaced by each of the names beside it.
pub(super) fn renamed(name: &str, table: &[(&str, &[&str])]) -> Vec<String> {
    match table.iter().find(|(ours, _)| name.contains(ours)) {
        Some((ours, theirs)) => theirs.iter().map(|theirs| name.replace(ours, theirs)).collect(),
        None => vec![name.to_string()],
    }
}
