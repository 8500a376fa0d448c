//! Mistakes of users and their errors, which name the operation, the value that was got and the one that was wanted. No mistake may
//! panic or pass.

#[path = "mistakes/files.rs"]
mod files;
#[path = "mistakes/layers.rs"]
mod layers;
#[path = "mistakes/operations.rs"]
mod operations;
#[path = "mistakes/tensors.rs"]
mod tensors;
#[path = "mistakes/training.rs"]
mod training;

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx::nn::Scope;
use phalanx::{DType, Device, Tensor, Var};

#[test]
fn operations_name_themselves_what_came_and_what_was_wanted() {
    check(operations::mistakes());
}

#[test]
fn tensors_and_in_place_operations_refuse_what_they_cannot_do() {
    check(tensors::mistakes());
}

#[test]
fn layers_refuse_settings_and_inputs_that_make_no_sense() {
    check(layers::mistakes());
}

#[test]
fn backward_passes_optimizers_and_data_refuse_misuse() {
    check(training::mistakes());
}

#[test]
fn damaged_and_unfit_files_are_refused() {
    check(files::mistakes());
}

#[test]
fn there_are_enough_of_them() {
    let all: [Vec<Mistake>; 5] = [
        operations::mistakes(),
        tensors::mistakes(),
        layers::mistakes(),
        training::mistakes(),
        files::mistakes(),
    ];
    assert!(all.iter().map(Vec::len).sum::<usize>() >= 250);
}

/// A line of the table, the words that the error must contain, and the call, which gives the error's text.
pub struct Mistake {
    /// Its line.
    pub line: u32,
    /// The words that the message contains.
    pub words: Vec<&'static str>,
    /// Makes the mistake.
    pub call: Box<dyn Fn() -> Option<String>>,
}

/// Turns `words => call;` lines into a list of [`Mistake`]s. The words are one text, separated by ` | `; the message begins with
/// the first.
macro_rules! mistakes {
    ($($words:literal => $call:expr;)*) => {
        vec![$($crate::Mistake {
            line: line!(),
            words: $words.split(" | ").collect(),
            call: Box::new(|| $crate::text($call)),
        }),*]
    };
}
pub(crate) use mistakes;

/// The error's message; `Debug`, which a program that ends with an error prints, must be the same.
pub fn text<T, E: Display + Debug>(outcome: Result<T, E>) -> Option<String> {
    let error = outcome.err()?;
    assert_eq!(format!("{error:?}"), error.to_string());
    Some(error.to_string())
}

/// Makes every mistake, and reports those with another error than expected.
pub fn check(mistakes: Vec<Mistake>) {
    let mut wrong = Vec::new();
    for Mistake { line, words, call } in mistakes {
        let outcome = catch_unwind(AssertUnwindSafe(call));
        if std::env::var_os("MISTAKES").is_some() {
            println!("{line}: {outcome:?}");
        }
        match outcome {
            Err(_) => wrong.push(format!("line {line}: panicked")),
            Ok(None) => wrong.push(format!("line {line}: accepted, wanted {words:?}")),
            Ok(Some(text))
                if !text.starts_with(words[0]) || !words.iter().all(|word| text.contains(word)) =>
            {
                wrong.push(format!("line {line}: wanted {words:?}, got: {text}"));
            }
            Ok(Some(_)) => {}
        }
    }
    assert!(wrong.is_empty(), "{} mistakes:\n{}", wrong.len(), wrong.join("\n"));
}

/// Zeros of f32.
pub fn f(shape: &[usize]) -> Var {
    of(shape, DType::F32)
}

/// Zeros of a dtype.
pub fn of(shape: &[usize], dtype: DType) -> Var {
    Var::new(zeros(shape, dtype))
}

/// Zeros as a tensor.
pub fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, Device::CPU).unwrap()
}

/// i64 numbers.
pub fn i(values: &[i64]) -> Var {
    Var::from_slice(values, &[values.len()], Device::CPU).unwrap()
}

/// Zeros of f32 without elements.
pub fn meta(shape: &[usize]) -> Var {
    Var::new(Tensor::zeros(shape, DType::F32, Device::Meta(0)).unwrap())
}

/// Zeros of f32 on another device.
pub fn elsewhere(shape: &[usize]) -> Var {
    Var::new(Tensor::zeros(shape, DType::F32, Device::Cpu(7)).unwrap())
}

/// A leaf of zeros.
pub fn leaf(shape: &[usize]) -> Var {
    Var::leaf(zeros(shape, DType::F32)).unwrap()
}

/// The scope in which layers are made.
pub fn scope() -> Scope {
    Scope::new(0, DType::F32, Device::CPU)
}
