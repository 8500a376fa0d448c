//! A matrix's view of a slice: any row and column stride, bounds proven once when it is made.

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`. Strides may be 0 (broadcast).
#[derive(Clone, Copy)]
pub(crate) struct MatRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> MatRef<'a, T> {
    /// # Panics
    ///
    /// If an element lies outside `data`.
    #[inline]
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Self {
        assert!(
            span([(rows, row_stride), (cols, col_stride)]) <= data.len(),
            "a {rows} x {cols} matrix with strides {row_stride}, {col_stride} exceeds {} elements",
            data.len()
        );
        MatRef { data, rows, cols, row_stride, col_stride }
    }

    /// A matrix whose rows lie one after the other.
    pub(crate) fn row_major(data: &'a [T], rows: usize, cols: usize) -> Self {
        MatRef::new(data, rows, cols, cols, 1)
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        MatRef {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn strides(&self) -> (usize, usize) {
        (self.row_stride, self.col_stride)
    }

    /// The slice from its first element on.
    pub(super) fn data(&self) -> &'a [T] {
        self.data
    }

    /// The matrix of the same shape that starts `offset` elements later; empty matrices stay where they are.
    #[inline]
    pub(super) fn shifted(self, offset: usize) -> Self {
        if offset == 0 || self.rows == 0 || self.cols == 0 {
            return self;
        }
        MatRef::new(&self.data[offset..], self.rows, self.cols, self.row_stride, self.col_stride)
    }

    /// The same start and strides with another number of rows.
    pub(super) fn with_rows(self, rows: usize) -> Self {
        MatRef::new(self.data, rows, self.cols, self.row_stride, self.col_stride)
    }
}

/// A matrix to write: like [`MatRef`], but no two elements may share a place.
pub(crate) struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> MatMut<'a, T> {
    /// # Panics
    ///
    /// If an element lies outside `data`, or if the strides could give two elements one place.
    #[inline]
    pub(crate) fn new(
        data: &'a mut [T],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Self {
        let dims = [(rows, row_stride), (cols, col_stride)];
        assert!(
            span(dims) <= data.len() && disjoint(dims),
            "a {rows} x {cols} matrix with strides {row_stride}, {col_stride} in {} elements cannot be written",
            data.len()
        );
        MatMut { data, rows, cols, row_stride, col_stride }
    }

    /// A matrix whose rows lie one after the other.
    pub(crate) fn row_major(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        MatMut::new(data, rows, cols, cols, 1)
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        MatMut {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn strides(&self) -> (usize, usize) {
        (self.row_stride, self.col_stride)
    }

    pub(super) fn data(&mut self) -> &mut [T] {
        self.data
    }

    /// Whether `count` such matrices, `stride` elements apart, lie within the slice and apart from each other.
    pub(super) fn repeats(&self, count: usize, stride: usize) -> bool {
        let dims = [(count, stride), (self.rows, self.row_stride), (self.cols, self.col_stride)];
        span(dims) <= self.data.len() && disjoint(dims)
    }
}

/// One past the last element's place; 0 if there is none.
#[inline]
fn span<const N: usize>(dims: [(usize, usize); N]) -> usize {
    if dims.iter().any(|dim| dim.0 == 0) {
        return 0;
    }
    // What does not fit usize fits no slice either.
    dims.into_iter().fold(1, |end: usize, (len, stride)| end.saturating_add((len - 1).saturating_mul(stride)))
}

/// Whether every index has a place of its own, as it has when each stride steps over all that smaller ones reach.
fn disjoint<const N: usize>(mut dims: [(usize, usize); N]) -> bool {
    if dims.iter().any(|dim| dim.0 == 0) {
        return true;
    }
    dims.sort_unstable_by_key(|dim| dim.1);
    let mut reach = 0;
    dims.into_iter().filter(|dim| dim.0 > 1).all(|(len, stride)| {
        let apart = stride > reach;
        reach += (len - 1) * stride;
        apart
    })
}
