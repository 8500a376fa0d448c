//! The description of a batch of matrix products: sizes, element types, layouts, addresses, epilogue.

/// The type of a matrix's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// 64 bits.
    F64,
    /// 32 bits.
    F32,
    /// 16 bits, eight of them the exponent.
    BF16,
    /// 16 bits, five of them the exponent.
    F16,
}

impl Float {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Float::F64 => 8,
            Float::F32 => 4,
            Float::BF16 | Float::F16 => 2,
        }
    }
}

/// What is done with the sums of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// They are stored.
    Plain,
    /// Gelu (the approximation by tanh) of them is stored, and they are stored too, for the backward pass.
    GeluKept,
    /// They are multiplied by gelu's slope at the sums that [`Epilogue::GeluKept`] has stored.
    GeluBackward,
    /// They are stored, and so is the sum of each row of A: the gradient of a bias, where A is the transpose of a linear map's `dy`.
    RowSums,
}

impl Epilogue {
    /// Whether it writes or reads a matrix beside C.
    pub fn has_kept(self) -> bool {
        matches!(self, Epilogue::GeluKept | Epilogue::GeluBackward)
    }
}

/// How a matrix lies: by rows or by columns, `ld` elements from one row (column) to the next, and `step` elements from one matrix of the
/// batch to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixLayout {
    /// Whether columns lie together, instead of rows.
    pub in_columns: bool,
    /// The leading dimension.
    pub ld: usize,
    /// From one matrix to the next.
    pub step: usize,
}

impl MatrixLayout {
    /// How matrices lie whose strides from one matrix, row and column to the next are given. None if their rows (columns) overlap or
    /// their elements do not lie side by side.
    pub fn of(rows: usize, cols: usize, [step, row, col]: [usize; 3]) -> Option<MatrixLayout> {
        if (col == 1 || cols == 1) && (row >= cols || rows == 1) {
            return Some(MatrixLayout { in_columns: false, ld: if rows == 1 { cols } else { row }, step });
        }
        let in_columns = (row == 1 || rows == 1) && (col >= rows || cols == 1);
        in_columns.then_some(MatrixLayout { in_columns, ld: if cols == 1 { rows } else { col }, step })
    }

    /// Elements from the first matrix's first one to behind the last matrix's last one.
    pub fn span(&self, count: usize, rows: usize, cols: usize) -> usize {
        let (lines, length) = if self.in_columns { (cols, rows) } else { (rows, cols) };
        (count - 1) * self.step + (lines - 1) * self.ld + length
    }
}

/// A batch of products `c = epilogue(a b + bias)`, or `c += a b`: everything on which the choice of an algorithm may depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductForm {
    /// Of A and B.
    pub float: Float,
    /// Of C, the bias, the rows' sums and the kept sums.
    pub out_float: Float,
    /// The number of products.
    pub count: usize,
    /// m, n and k of `m x k` times `k x n`.
    pub size: [usize; 3],
    /// The left factors.
    pub a: MatrixLayout,
    /// The right factors.
    pub b: MatrixLayout,
    /// The results, by rows.
    pub c: MatrixLayout,
    /// Whether the products are added to what C holds.
    pub accumulate: bool,
    /// Whether there is a bias: a value for each column.
    pub bias: bool,
    /// What is done with the sums.
    pub epilogue: Epilogue,
    /// Alignments of A, B and C, in bytes.
    pub alignment: [u32; 3],
}

/// Where a product's matrices are on the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProductPointers {
    /// The left factors.
    pub a: u64,
    /// The right factors.
    pub b: u64,
    /// The results.
    pub c: u64,
    /// The bias, or where [`Epilogue::RowSums`] puts the sums; 0 without. A multiple of 16.
    pub bias: u64,
    /// The sums that [`Epilogue::GeluKept`] stores and [`Epilogue::GeluBackward`] reads, laid out as C; 0 without. A multiple of 16.
    pub kept: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_lies_in_rows_or_in_columns_or_in_no_way_that_the_library_knows() {
        let rows = |ld| Some(MatrixLayout { in_columns: false, ld, step: 7 });
        let columns = |ld| Some(MatrixLayout { in_columns: true, ld, step: 7 });
        let layout = MatrixLayout::of;
        assert_eq!(layout(3, 4, [7, 4, 1]), rows(4));
        assert_eq!(layout(3, 4, [7, 9, 1]), rows(9));
        assert_eq!(layout(3, 4, [7, 1, 3]), columns(3));
        assert_eq!(layout(1, 4, [7, 0, 1]), rows(4));
        assert_eq!(layout(1, 4, [7, 1, 5]), columns(5));
        assert_eq!(layout(3, 1, [7, 5, 9]), rows(5));
        assert_eq!(layout(3, 4, [7, 8, 2]), None);
        assert_eq!(layout(3, 4, [7, 0, 1]), None);
    }
}
