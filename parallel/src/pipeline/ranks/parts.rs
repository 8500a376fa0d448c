//! [`Parts`]: tensors that several ranks hold alike are sent in parts, one by each rank, and gathered where they arrive.

use phalanx_tensor::{Tensor, even_piece};

use crate::Result;
use crate::comm::{Call, Comm};

/// The ranks among which a tensor's elements are divided, in row-major order.
pub(super) struct Parts(Comm);

impl Parts {
    /// `None` if the group has one rank, which sends everything.
    pub(super) fn new(group: &Comm) -> Option<Parts> {
        (group.size() > 1).then(|| Parts(group.clone()))
    }

    /// This rank's part, `[elements]`. Of a contiguous tensor it is a view.
    pub(super) fn own(&self, tensor: &Tensor) -> Result<Tensor> {
        let piece = even_piece(tensor.numel(), self.0.size(), self.0.rank());
        Ok(tensor.with_shape(&[tensor.numel()])?.narrow(0, piece.start, piece.len())?)
    }

    /// Fills a contiguous tensor, of which every rank has its part, with the parts of all ranks.
    pub(super) fn gather(&self, tensor: &Tensor) -> Result<()> {
        let ranks = 0..self.0.size();
        let counts: Vec<usize> = ranks.map(|i| even_piece(tensor.numel(), self.0.size(), i).len()).collect();
        let all = tensor.with_shape(&[tensor.numel()])?;
        Ok(self.0.run(Call::all_gather_uneven(all, self.own(tensor)?, &counts))?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use phalanx_nn::autograd::Var;
    use phalanx_nn::{Init, Linear, LinearConfig, Module, Parameters, Scope};
    use phalanx_tensor::{DType, Dims};

    use super::super::{Pipeline, Spec, Stages};
    use super::*;
    use crate::launch;
    use crate::mesh::{Axis, Groups, Mesh};
    use crate::pipeline::schedule::one_f_one_b;

    const MICRO_BATCHES: usize = 4;

    /// A layer on each of two stages, the same on all ranks of a stage: `[rows, 6]` to the same.
    struct Layers(Linear, usize);

    impl Stages for Layers {
        fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
            let values: Vec<f32> = (0..self.1 * 6).map(|i| (micro_batch + i) as f32 * 0.3).collect();
            let x = Var::from_slice(&values, &[self.1, 6], self.0.weight.device())?;
            let y = self.0.forward(input.unwrap_or(&x))?;
            Ok(if stage == 1 { y.square()?.sum_all()? } else { y })
        }

        fn input_spec(&self, _: usize, _: usize) -> Option<Spec> {
            Some(Spec { shape: Dims::from_slice(&[self.1, 6]), dtype: DType::F32 })
        }
    }

    /// The gradients of every rank, and the bytes that it sends to the other stage.
    fn train(ranks: usize, rows: usize, scatters: bool) -> Vec<(Vec<Vec<f32>>, u64)> {
        launch::threads(2 * ranks, move |rank| -> Result<_> {
            let groups = Groups::new(Mesh::new(ranks, 1, 2)?, rank.comm())?;
            let (line, tensor_parallel) = (groups.along(Axis::Pp), groups.along(Axis::Tp));
            let scope = Scope::new(7, DType::F32, rank.device()).child(line.rank());
            let layers =
                LinearConfig::new(6, 6).with_init(Init::Normal { mean: 0.0, std: 0.5 }).init(&scope)?;
            let mut pipeline = Pipeline::new(&one_f_one_b(2, MICRO_BATCHES)?, line.clone(), rank.device())?;
            if scatters {
                pipeline = pipeline.scatter_gather(tensor_parallel);
            }
            let stages = Arc::new(Layers(layers, rows));
            pipeline.train(&stages)?;
            let grads = stages.0.parameters().into_iter().map(|p| Ok(p.grad()?.unwrap().to_vec::<f32>()?));
            Ok((grads.collect::<Result<_>>()?, line.traffic().bytes))
        })
        .unwrap()
    }

    #[test]
    fn parts_have_the_bits_of_whole_tensors_and_a_part_of_the_bytes() {
        for (ranks, rows) in [(2, 3), (3, 4), (1, 2)] {
            for (whole, parts) in train(ranks, rows, false).into_iter().zip(train(ranks, rows, true)) {
                assert_eq!(whole.0, parts.0, "{ranks} {rows}");
                assert_eq!(whole.1, (MICRO_BATCHES * rows * 6 * 4) as u64);
                assert_eq!(whole.1, parts.1 * ranks as u64);
            }
        }
    }

    #[test]
    fn ranks_that_do_not_divide_the_elements_have_the_same_bits() {
        // 18 elements over 4 ranks, and 6 over 7, of which the last sends none.
        for (ranks, rows) in [(4, 3), (7, 1)] {
            let of = |scatters| {
                train(ranks, rows, scatters).into_iter().map(|(grads, _)| grads).collect::<Vec<_>>()
            };
            assert_eq!(of(false), of(true), "{ranks} {rows}");
        }
    }
}
