//! How a matrix lies in memory.

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::pointer::{Host, Plain};

use crate::element::ElementType;
use crate::status::{Failure, Result, Status, present};

/// A matrix, or a batch of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub kind: ElementType,
    /// Whether rows lie together, rather than columns.
    pub by_rows: bool,
    pub rows: usize,
    pub columns: usize,
    /// Elements from one column (row) to the next.
    pub leading: usize,
    pub batches: usize,
    /// Elements from one matrix to the next.
    pub batch_stride: i64,
}

impl Layout {
    /// Elements from a row to the next, and from a column to the next.
    pub(crate) fn strides(&self) -> (usize, usize) {
        if self.by_rows { (self.leading, 1) } else { (1, self.leading) }
    }

    /// How many runs of elements that lie together, and how long each is.
    fn runs(&self) -> (usize, usize) {
        if self.by_rows { (self.rows, self.columns) } else { (self.columns, self.rows) }
    }

    /// Bytes from the first element of one matrix to behind its last.
    pub(crate) fn bytes(&self) -> usize {
        let (runs, length) = self.runs();
        if runs == 0 || length == 0 { 0 } else { ((runs - 1) * self.leading + length) * self.kind.bytes() }
    }

    /// Where matrix `batch` begins, in bytes from the first.
    pub(crate) fn offset(&self, batch: usize) -> i64 {
        batch as i64 * self.batch_stride * self.kind.bytes() as i64
    }

    /// The ranges of bytes that the elements lie in, offset and size: the first `most` of them. The search for missing
    /// waits is content with some; a write takes all.
    pub(crate) fn ranges(&self, most: usize) -> Vec<(i64, usize)> {
        let (runs, length) = self.runs();
        let size = self.kind.bytes();
        let together = length == self.leading || runs == 1;
        let of_one = |batch: usize| {
            let runs = if together { 1 } else { runs };
            let bytes = if together { self.bytes() } else { length * size };
            (0..runs).map(move |run| (self.offset(batch) + (run * self.leading * size) as i64, bytes))
        };
        (0..self.batches).flat_map(of_one).take(most).collect()
    }

    fn check(&self) -> Result<()> {
        let (_, length) = self.runs();
        if self.leading < length {
            let why =
                format!("a leading dimension of {} for {length} elements that lie together", self.leading);
            return Err(Status::INVALID_VALUE.because(why));
        }
        Ok(())
    }
}

/// All layouts.
pub(crate) static LAYOUTS: Handles<Layout> = Handles::new("matrix layout", 17);

/// The layout of a handle, if it can be one of a matrix.
pub(crate) fn layout(handle: usize, name: &str) -> Result<Layout> {
    let layout = LAYOUTS
        .get(handle)
        .map_err(Failure::from)
        .map_err(|e| e.status.because(format!("{name}: {}", e.message)))?;
    layout.check().map_err(|e| e.status.because(format!("{name}: {}", e.message)))?;
    Ok(layout)
}

/// A size or a count that C gives as a signed number.
pub(crate) fn size(name: &str, number: i64) -> Result<usize> {
    usize::try_from(number).map_err(|_| Status::INVALID_VALUE.because(format!("{name} is {number}")))
}

/// Sets an attribute, by its number in `cublasLtMatrixLayoutAttribute_t`.
pub(crate) fn set(layout: &mut Layout, attribute: i32, at: Host, bytes: usize) -> Result<()> {
    match attribute {
        0 => layout.kind = ElementType::from_number(value("type", at, bytes)?)?,
        1 => {
            layout.by_rows = match value::<i32>("order", at, bytes)? {
                0 => false,
                1 => true,
                order => return Err(Status::NOT_SUPPORTED.because(format!("order {order} is not emulated"))),
            }
        }
        2 => layout.rows = size("rows", value("rows", at, bytes)?)?,
        3 => layout.columns = size("columns", value("columns", at, bytes)?)?,
        4 => layout.leading = size("the leading dimension", value("leading dimension", at, bytes)?)?,
        5 => layout.batches = size("the batch count", i64::from(value::<i32>("batch count", at, bytes)?))?,
        6 => layout.batch_stride = value("batch stride", at, bytes)?,
        _ => {
            return Err(
                Status::NOT_SUPPORTED.because(format!("layout attribute {attribute} is not emulated"))
            );
        }
    }
    Ok(())
}

/// Writes an attribute's value to C and gives its bytes.
pub(crate) fn get(layout: &Layout, attribute: i32, to: Host) -> Result<usize> {
    let (done, bytes) = match attribute {
        1 => (to.set(i32::from(layout.by_rows)), 4),
        2 => (to.set(layout.rows as u64), 8),
        3 => (to.set(layout.columns as u64), 8),
        4 => (to.set(layout.leading as i64), 8),
        5 => (to.set(layout.batches as i32), 4),
        6 => (to.set(layout.batch_stride), 8),
        _ => {
            return Err(
                Status::NOT_SUPPORTED.because(format!("layout attribute {attribute} is not emulated"))
            );
        }
    };
    present(done, "the buffer").map(|()| bytes)
}

/// The value of an attribute, whose size must be right.
pub(crate) fn value<T: Plain>(name: &str, at: Host, bytes: usize) -> Result<T> {
    if bytes != size_of::<T>() {
        let why = format!("attribute {name} has {} bytes, not {bytes}", size_of::<T>());
        return Err(Status::INVALID_VALUE.because(why));
    }
    present(at.get(), name)
}
