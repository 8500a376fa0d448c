//! The table's form, and values to make mistakes with.

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx::nn::Scope;
use phalanx::{DType, Device, Tensor, Var};

/// A line of the table, the words that the error must contain, and the call, which gives the error's text.
pub struct Mistake {
    pub line: u32,
    pub words: Vec<&'static str>,
    pub call: Box<dyn Fn() -> Option<String>>,
}

/// `words => call;` lines as a list of [`Mistake`]s. The words stand in one text, separated by ` | `; the first is how the
/// message begins.
macro_rules! mistakes {
    ($($words:literal => $call:expr;)*) => {
        vec![$($crate::kit::Mistake {
            line: line!(),
            words: $words.split(" | ").collect(),
            call: Box::new(|| $crate::kit::text($call)),
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

/// Makes every mistake, and tells all that go wrong in another way than they should.
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

/// Where layers are made.
pub fn scope() -> Scope {
    Scope::new(0, DType::F32, Device::CPU)
}
