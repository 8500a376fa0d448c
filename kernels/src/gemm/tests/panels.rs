//! A B in panels.

use super::*;

/// The elements of a matrix [in panels](MatRef::in_panels), the last one filled up with what no sum may hold.
pub(super) fn of<T: GemmElem>(matrix: MatRef<'_, T>, width: usize, runner: Runner) -> Vec<T> {
    let ((row, col), filling) = (matrix.strides(), T::narrow(T::Acc::from_f64(f64::NAN)));
    let at = |step: usize, j: usize| match (step < matrix.rows(), j < matrix.cols()) {
        (false, _) => T::narrow(T::Acc::ZERO),
        (_, false) => filling,
        _ => matrix.data()[step * row + j * col],
    };
    let panels = (0..matrix.cols()).step_by(width);
    let steps = matrix.rows().next_multiple_of(T::PANEL_STEPS);
    let groups = panels.flat_map(|panel| (0..steps).step_by(T::GROUP).map(move |step| (panel, step)));
    let places = groups.flat_map(|(panel, step)| (panel..panel + width).map(move |j| (j, step)));
    let of_group = |place| (0..T::GROUP).position(|nth| place_in_group(runner, T::GROUP, nth) == place);
    places
        .flat_map(|(j, step)| (0..T::GROUP).map(move |place| at(step + of_group(place).unwrap(), j)))
        .collect()
}

#[test]
fn rows_and_steps_of_any_number_meet_panels_and_change_no_bit() {
    let pools = pools();
    // One row, a tile's rows, more; steps that fill tiles, that do not, and of several blocks.
    for (m, n, k) in [
        (1, 33, 32),
        (1, 300, 544),
        (1, 160, 97),
        (2, 97, 64),
        (3, 129, 544),
        (15, 64, 32),
        (16, 130, 96),
        (17, 33, 64),
        (31, 40, 31),
        (33, 96, 544),
        (70, 97, 1088),
        (130, 300, 64),
        (520, 97, 544),
    ] {
        for lie in if m * n * k < 1 << 18 { &LIES[..] } else { &LIES[..1] } {
            let case = Case { lies: (*lie, Lie::Cols, Lie::Rows), bias: m % 2 == 1, ..Case::plain(m, n, k) };
            check::<bf16>(case, &pools[..2]);
        }
    }
}
