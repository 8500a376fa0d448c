//! [`clock_cycles`]: in which order the cells of a pipeline are computed; and what of it each device does.

use phalanx_tensor::Device;

/// One micro-batch at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell {
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// The stage, from 0.
    pub stage: usize,
}

/// The ticks of a pipeline of `micro_batches` over `stages`: a cell runs one tick after the one that its input comes
/// from. There are `micro_batches + stages - 1`, and the cells of one tick do not depend on each other.
///
/// ```text
/// m = 4, n = 3        tick   0    1    2    3    4    5
///                  stage 0   0    1    2    3
///                  stage 1        0    1    2    3
///                  stage 2             0    1    2    3
/// ```
/// Source: torchgpipe (arXiv:2004.09910), algorithm 1.
pub fn clock_cycles(micro_batches: usize, stages: usize) -> Vec<Vec<Cell>> {
    if micro_batches == 0 || stages == 0 {
        return Vec::new();
    }
    let tick = |tick: usize| {
        let first = (tick + 1).saturating_sub(micro_batches);
        let last = (tick + 1).min(stages);
        (first..last).map(|stage| Cell { micro_batch: tick - stage, stage }).collect()
    };
    (0..micro_batches + stages - 1).map(tick).collect()
}

/// The cells of each device, in order of their ticks, given the device of each stage. Devices come in the order of
/// their first stages.
pub fn device_orders(micro_batches: usize, stages: &[Device]) -> Vec<(Device, Vec<Cell>)> {
    let mut orders: Vec<(Device, Vec<Cell>)> = Vec::new();
    for cell in clock_cycles(micro_batches, stages.len()).into_iter().flatten() {
        let device = stages[cell.stage];
        match orders.iter_mut().find(|(known, _)| *known == device) {
            Some((_, cells)) => cells.push(cell),
            None => orders.push((device, vec![cell])),
        }
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(micro_batches: usize, stages: usize) -> Vec<Vec<(usize, usize)>> {
        let pair = |c: Cell| (c.micro_batch, c.stage);
        let cycles = clock_cycles(micro_batches, stages);
        cycles.into_iter().map(|tick| tick.into_iter().map(pair).collect()).collect()
    }

    #[test]
    fn ticks_are_the_diagonals() {
        assert_eq!(pairs(1, 1), [[(0, 0)]]);
        assert_eq!(pairs(1, 3), [[(0, 0)], [(0, 1)], [(0, 2)]]);
        assert_eq!(pairs(3, 1), [[(0, 0)], [(1, 0)], [(2, 0)]]);
        let wanted = vec![
            vec![(0, 0)],
            vec![(1, 0), (0, 1)],
            vec![(2, 0), (1, 1), (0, 2)],
            vec![(2, 1), (1, 2)],
            vec![(2, 2)],
        ];
        assert_eq!(pairs(3, 3), wanted);
        assert_eq!(pairs(4, 2).len(), 5);
        assert!(pairs(0, 3).is_empty() && pairs(3, 0).is_empty());
    }

    #[test]
    fn a_device_takes_its_cells_tick_by_tick() {
        let [a, b] = [Device::Cpu(0), Device::Cpu(1)];
        let cells = |order: &[Cell]| order.iter().map(|c| (c.micro_batch, c.stage)).collect::<Vec<_>>();
        let orders = device_orders(3, &[a, b]);
        assert_eq!(orders.iter().map(|o| o.0).collect::<Vec<_>>(), [a, b]);
        assert_eq!(cells(&orders[0].1), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(cells(&orders[1].1), [(0, 1), (1, 1), (2, 1)]);
        let one = device_orders(3, &[a, a]);
        assert_eq!(cells(&one[0].1), [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]);
        let back = device_orders(2, &[a, b, a]);
        assert_eq!(cells(&back[0].1), [(0, 0), (1, 0), (0, 2), (1, 2)]);
    }
}
