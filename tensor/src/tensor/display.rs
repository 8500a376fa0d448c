//! Tensors as text: their elements, without the middle of large dimensions, then a line with shape, dtype and device.

use std::fmt::{self, Write};

use crate::{DType, Read, Result, Tensor, bf16, f16};

/// Elements shown at either end of a dimension that is summarised.
const EDGE: usize = 3;
/// Tensors of more elements are summarised.
const THRESHOLD: usize = 1000;
/// Columns of a line.
const WIDTH: usize = 80;

/// ```
/// # use phalanx_tensor::{Device, Tensor};
/// let x = Tensor::from_slice(&[1f32, -2.5, 3., 4.], &[2, 2], Device::CPU)?;
/// assert_eq!(x.to_string(), "[[ 1.0000, -2.5000],\n [ 3.0000,  4.0000]]\nTensor [2, 2] f32 cpu:0");
/// # Ok::<(), phalanx_tensor::Error>(())
/// ```
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.device().is_meta() {
            match Cells::new(self) {
                Ok(cells) => cells.print(f, 0, 0)?,
                Err(error) => write!(f, "<{error}>")?,
            }
            f.write_char('\n')?;
        }
        write!(f, "Tensor {:?} {} {}", self.shape(), self.dtype(), self.device())
    }
}

/// As [`Display`](fmt::Display).
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The elements of a tensor that are printed.
struct Cells<'a> {
    tensor: &'a Tensor,
    bytes: Read<'a, u8>,
    style: Style,
    width: usize,
}

/// How floats are written.
#[derive(Clone, Copy)]
enum Style {
    Integral,
    Fixed,
    Scientific,
}

impl<'a> Cells<'a> {
    fn new(tensor: &'a Tensor) -> Result<Cells<'a>> {
        let bytes = tensor.read_bytes("display")?;
        let mut cells = Cells { tensor, bytes, style: Style::Fixed, width: 0 };
        let mut shown = Vec::new();
        cells.positions(0, tensor.offset(), &mut shown);
        cells.style = style(shown.iter().map(|&at| cells.float(at)));
        cells.width = shown.iter().map(|&at| cells.text(at).len()).max().unwrap_or(0);
        Ok(cells)
    }

    /// Indices shown along `dim`; `None` stands for those left out.
    fn indices(&self, dim: usize) -> Vec<Option<usize>> {
        let size = self.tensor.shape()[dim];
        if self.tensor.numel() <= THRESHOLD || size <= 2 * EDGE {
            return (0..size).map(Some).collect();
        }
        (0..EDGE).map(Some).chain([None]).chain((size - EDGE..size).map(Some)).collect()
    }

    fn positions(&self, dim: usize, at: usize, out: &mut Vec<usize>) {
        if self.tensor.numel() == 0 {
            return;
        }
        if dim == self.tensor.rank() {
            return out.push(at);
        }
        for index in self.indices(dim).into_iter().flatten() {
            self.positions(dim + 1, at + index * self.tensor.strides()[dim], out);
        }
    }

    /// Prints the part that begins `at` elements after the tensor's first one.
    fn print(&self, f: &mut fmt::Formatter<'_>, dim: usize, at: usize) -> fmt::Result {
        let Some(left) = self.tensor.rank().checked_sub(dim + 1) else {
            return write!(f, "{:>1$}", self.text(self.tensor.offset() + at), self.width);
        };
        if self.tensor.numel() == 0 {
            return f.write_str("[]");
        }
        let in_line = (WIDTH.saturating_sub(dim + 1) / (self.width + 2)).max(1);
        f.write_char('[')?;
        for (i, index) in self.indices(dim).into_iter().enumerate() {
            if i > 0 {
                let breaks = if left > 0 { left } else { usize::from(i % in_line == 0) };
                let indent = if breaks > 0 { dim + 1 } else { 0 };
                write!(f, ",{}{:indent$}", if breaks > 0 { "\n".repeat(breaks) } else { " ".into() }, "")?;
            }
            match index {
                Some(index) => self.print(f, dim + 1, at + index * self.tensor.strides()[dim])?,
                None => f.write_str("...")?,
            }
        }
        f.write_char(']')
    }

    fn element<T: bytemuck::Pod>(&self, at: usize) -> T {
        bytemuck::pod_read_unaligned(&self.bytes[at * size_of::<T>()..][..size_of::<T>()])
    }

    fn float(&self, at: usize) -> f64 {
        match self.tensor.dtype() {
            DType::F64 => self.element(at),
            DType::F32 => f64::from(self.element::<f32>(at)),
            DType::BF16 => self.element::<bf16>(at).to_f64(),
            DType::F16 => self.element::<f16>(at).to_f64(),
            _ => 0.,
        }
    }

    fn text(&self, at: usize) -> String {
        match self.tensor.dtype() {
            DType::I64 => self.element::<i64>(at).to_string(),
            DType::I32 => self.element::<i32>(at).to_string(),
            DType::U8 => self.element::<u8>(at).to_string(),
            DType::Bool => (self.element::<u8>(at) != 0).to_string(),
            _ => match (self.float(at), self.style) {
                (x, _) if x.is_nan() => "nan".into(),
                (x, _) if x.is_infinite() => if x > 0. { "inf" } else { "-inf" }.into(),
                (x, Style::Integral) => format!("{x:.0}."),
                (x, Style::Fixed) => format!("{x:.4}"),
                (x, Style::Scientific) => format!("{x:.4e}"),
            },
        }
    }
}

/// Plain decimals where they show every element's size, as PyTorch decides it.
fn style(elements: impl Iterator<Item = f64> + Clone) -> Style {
    let finite = elements.filter(|x| x.is_finite() && *x != 0.).map(f64::abs);
    let (low, high) = finite.clone().fold((f64::INFINITY, 0f64), |(l, h), x| (l.min(x), h.max(x)));
    let integral = finite.clone().all(|x| x.fract() == 0.);
    if high == 0. || (integral && high < 1e8) {
        return Style::Integral;
    }
    if high / low > 1e3 || high >= 1e8 || low < 1e-4 { Style::Scientific } else { Style::Fixed }
}
