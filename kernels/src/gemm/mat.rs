//! Views of matrices in slices, with any row and column stride and bounds proven once, when a view is made: [`MatRef`] to read, [`MatMut`] to write.
//! [`SubMatMut`] is a part of a matrix, so that threads write parts of the same rows; [`SharedMut`] is the unchecked form of that inside `gemm`.

#![allow(unsafe_code)]

use std::marker::PhantomData;

use super::element::GemmElem;

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`, unless it lies [in panels](MatRef::in_panels). Strides may be 0
/// (broadcast).
#[derive(Clone, Copy)]
pub(crate) struct MatRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    /// Columns of a panel; 0 if there are none.
    panel: usize,
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
        MatRef { data, rows, cols, row_stride, col_stride, panel: 0 }
    }

    /// A matrix whose columns lie in panels of so many, one after the other; the last one is as wide as the others. Each has its rows one after the
    /// other, or of bf16 two rows together, so that the two elements of a column lie side by side ([`GemmElem::GROUP`], [`place_in_group`](super::place_in_group)),
    /// and then as many rows of zeros as complete [`GemmElem::PANEL_STEPS`].
    ///
    /// # Panics
    ///
    /// If a panel exceeds `data`.
    pub(crate) fn in_panels(data: &'a [T], rows: usize, cols: usize, panel: usize) -> Self
    where
        T: GemmElem,
    {
        let all = rows.next_multiple_of(T::PANEL_STEPS).saturating_mul(cols.next_multiple_of(panel));
        assert!(
            all <= data.len(),
            "a {rows} x {cols} matrix in panels of {panel} exceeds {} elements",
            data.len()
        );
        MatRef { data, rows, cols, row_stride: panel, col_stride: 1, panel }
    }

    /// A matrix whose rows lie one after the other.
    pub(crate) fn row_major(data: &'a [T], rows: usize, cols: usize) -> Self {
        MatRef::new(data, rows, cols, cols, 1)
    }

    /// The same elements with rows and columns exchanged. No matrix of panels.
    pub(crate) fn transposed(self) -> Self {
        assert!(!self.is_in_panels(), "panels are of columns");
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

    /// The slice from the matrix's first element on.
    pub(super) fn data(&self) -> &'a [T] {
        self.data
    }

    /// How many columns a panel has; 0 if it does not lie in panels.
    pub(super) fn panel(&self) -> usize {
        self.panel
    }

    /// Whether it lies in panels.
    pub(super) fn is_in_panels(&self) -> bool {
        self.panel > 0
    }

    /// Where a column begins; the first one of a panel, if it lies in panels.
    pub(super) fn column(&self, col: usize) -> usize
    where
        T: GemmElem,
    {
        if self.is_in_panels() {
            debug_assert!(col.is_multiple_of(self.panel), "a panel's first column");
            return col * self.rows.next_multiple_of(T::PANEL_STEPS);
        }
        col * self.col_stride
    }

    /// The matrix of the same shape that starts `offset` elements later; empty matrices stay where they are.
    #[inline]
    pub(super) fn shifted(self, offset: usize) -> Self {
        if offset == 0 || self.rows == 0 || self.cols == 0 {
            return self;
        }
        assert!(!self.is_in_panels(), "one product");
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

/// Whether no two indices have the same place: each stride exceeds the largest offset that the smaller strides reach.
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

/// A slice that several threads write, each its own elements.
#[derive(Clone, Copy)]
pub(super) struct SharedMut<'a, T> {
    ptr: *mut T,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it gives no access but a pointer, whose users keep threads apart.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        SharedMut { ptr: slice.as_mut_ptr(), lifetime: PhantomData }
    }

    /// The start, for pointer arithmetic within the slice.
    pub(super) fn ptr(&self) -> *mut T {
        self.ptr
    }
}

/// A submatrix to write: some neighbouring columns of some neighbouring rows.
pub(crate) struct SubMatMut<'a, T> {
    start: *mut T,
    rows: usize,
    cols: usize,
    /// Elements from one row to the next.
    stride: usize,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: a submatrix is the one way to its elements, like `&mut [T]`, and goes where that may go.
unsafe impl<T: Send> Send for SubMatMut<'_, T> {}

impl<'a, T> SubMatMut<'a, T> {
    /// Cuts a contiguous matrix `[rows, across * cols]` into submatrices of `cols` columns and at most `height` rows: from the
    /// top to the bottom, then the next columns.
    ///
    /// # Panics
    /// If `data` is shorter than that, or `height` is 0.
    pub(crate) fn cut(
        data: &'a mut [T],
        rows: usize,
        [across, cols]: [usize; 2],
        height: usize,
    ) -> impl Iterator<Item = SubMatMut<'a, T>> {
        let stride = across * cols;
        let needed = rows.checked_mul(stride);
        assert!(
            needed.is_some_and(|n| n <= data.len()),
            "{rows} rows of {stride} in {} elements",
            data.len()
        );
        let start = data.as_mut_ptr();
        (0..across).flat_map(move |i| {
            (0..rows).step_by(height).map(move |top| SubMatMut {
                start: start.wrapping_add(top * stride + i * cols),
                rows: height.min(rows - top),
                cols,
                stride,
                data: PhantomData,
            })
        })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// # Panics
    /// If there is no such row.
    pub(crate) fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies inside the slice that `cut` took, which is borrowed mutably as long as the submatrix lives: its
        // end is at most `rows * stride` of the matrix. No other submatrix has its elements, for the columns or the rows of any
        // two differ and the columns of one end before those of the next begin. The submatrix is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.stride), self.cols) }
    }
}

#[cfg(test)]
mod tests {
    use super::SubMatMut;

    #[test]
    fn every_element_lies_in_one_cell_from_the_top_down() {
        for (rows, [across, cols], height) in
            [(7, [3, 2], 3), (1, [1, 1], 1), (4, [2, 3], 9), (0, [2, 2], 1), (3, [2, 0], 2), (3, [0, 2], 2)]
        {
            let mut data = vec![0; rows * across * cols + 1];
            let mut cells: Vec<_> = SubMatMut::cut(&mut data, rows, [across, cols], height).collect();
            assert_eq!(cells.len(), across * rows.div_ceil(height));
            for (number, cell) in cells.iter_mut().enumerate() {
                (0..cell.rows()).for_each(|i| cell.row(i).iter_mut().for_each(|x| *x += number + 1));
            }
            for (place, x) in data[..rows * across * cols].iter().enumerate() {
                let (row, col) = (place / (across * cols), place % (across * cols));
                assert_eq!(*x, col / cols * rows.div_ceil(height) + row / height + 1);
            }
            assert_eq!(data.last(), Some(&0));
        }
    }

    #[test]
    #[should_panic(expected = "elements")]
    fn a_matrix_larger_than_its_slice_is_refused() {
        let _ = SubMatMut::cut(&mut [0; 5], 3, [1, 2], 1);
    }

    #[test]
    #[should_panic(expected = "row 1")]
    fn a_row_that_is_not_there_is_refused() {
        let mut data = [0; 4];
        SubMatMut::cut(&mut data, 2, [1, 2], 1).for_each(|mut cell| cell.row(1).fill(1));
    }
}
