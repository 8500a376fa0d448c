//! [`ClassesLast`]: losses of class indices over logits `[.., C]`.

use phalanx_autograd::{NllLoss, Reduction, Var};

use crate::{CrossEntropyLoss, Error, Loss, Result};

/// A loss of class indices whose classes are the *last* dimension of its input: logits `[B, T, C]` and targets `[B, T]`, of a
/// language model. By itself such a loss takes the classes at dimension 1, as PyTorch does: `[N, C, ..]` and `[N, ..]`.
///
/// ```
/// use phalanx_nn::autograd::Var;
/// use phalanx_nn::tensor::Device;
/// use phalanx_nn::{CrossEntropyLoss, Loss};
/// let logits = Var::from_slice(&[0f32; 2 * 3 * 5], &[2, 3, 5], Device::CPU)?;
/// let targets = Var::from_slice(&[0i64, 1, 2, 3, 4, 0], &[2, 3], Device::CPU)?;
/// let loss = CrossEntropyLoss::default().classes_last().forward(&logits, &targets)?;
/// assert!((loss.item::<f32>()? - 5f32.ln()).abs() < 1e-6);
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ClassesLast<L>(pub L);

impl CrossEntropyLoss {
    /// The same loss of logits `[.., C]` and class indices `[..]`.
    pub fn classes_last(self) -> ClassesLast<CrossEntropyLoss> {
        ClassesLast(self)
    }
}

/// Of logits `[.., C]` and class indices `[..]`; a scalar, or with `Reduction::None` `[..]`.
impl Loss for ClassesLast<CrossEntropyLoss> {
    fn forward(&self, x: &Var, t: &Var) -> Result<Var> {
        last("CrossEntropyLoss", &self.0, self.0.reduction, x, t)
    }
}

/// Of logarithms of probabilities `[.., C]` and class indices `[..]`; a scalar, or with `Reduction::None` `[..]`.
impl Loss for ClassesLast<NllLoss> {
    fn forward(&self, x: &Var, t: &Var) -> Result<Var> {
        last("NllLoss", &self.0, self.0.reduction, x, t)
    }
}

fn last(name: &str, loss: &impl Loss, reduction: Reduction, x: &Var, t: &Var) -> Result<Var> {
    let Some((&classes, items)) = x.shape().split_last().filter(|(_, items)| *items == t.shape()) else {
        let why = format!(
            "got an input of shape {:?} and targets of shape {:?}, wanted [.., C] and [..]",
            x.shape(),
            t.shape()
        );
        return Err(Error::invalid(format!("{name}, classes last"), why));
    };
    let count = t.numel();
    let y = loss.forward(&x.reshape_to(&[count, classes])?, &t.reshape_to(&[count])?)?;
    if reduction == Reduction::None { Ok(y.reshape_to(items)?) } else { Ok(y) }
}

/// Refuses targets that fit only the classes at the end, and says what takes them there.
pub(crate) fn check_first(name: &str, x: &Var, t: &Var) -> Result<()> {
    let shape = x.shape();
    let (Some((_, items)), true) = (shape.split_last(), shape.len() > 2) else { return Ok(()) };
    if items != t.shape() || (shape[0] == items[0] && shape[2..] == items[1..]) {
        return Ok(());
    }
    let wanted = [&shape[..1], &shape[2..]].concat();
    let why = format!(
        "got an input of shape {shape:?}, whose classes are dimension 1, and targets of shape {items:?}, wanted {wanted:?}; \
         if the classes come last, use `ClassesLast({name} {{ .. }})`"
    );
    Err(Error::invalid(name, why))
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    fn logits(shape: &[usize]) -> Var {
        let values: Vec<f64> = (0..shape.iter().product()).map(|i| (i as f64 * 0.7).sin()).collect();
        Var::from_slice(&values, shape, Device::CPU).unwrap()
    }

    fn targets(shape: &[usize]) -> Var {
        let values: Vec<i64> = (0..shape.iter().product()).map(|i| (i % 3) as i64).collect();
        Var::from_slice(&values, shape, Device::CPU).unwrap()
    }

    #[test]
    fn classes_at_the_end_are_those_at_dimension_1_moved() {
        // With T = C both readings fit; each loss takes its own.
        for (shape, t) in [(&[2, 4, 3][..], &[2, 4][..]), (&[2, 3, 3], &[2, 3]), (&[5, 3], &[5]), (&[3], &[])]
        {
            let (x, t) = (logits(shape), targets(t));
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                let loss =
                    CrossEntropyLoss { reduction, label_smoothing: 0.1, ..CrossEntropyLoss::default() };
                let got = loss.clone().classes_last().forward(&x, &t).unwrap();
                let moved = if x.rank() == 3 { x.transpose(1, 2).unwrap() } else { x.clone() };
                let (moved, flat) = match x.rank() {
                    1 => (moved.reshape(&[1, 3]).unwrap(), t.reshape(&[1]).unwrap()),
                    _ => (moved, t.clone()),
                };
                let want = loss.forward(&moved, &flat).unwrap();
                let (g, w): (Vec<f64>, Vec<f64>) = (got.to_vec().unwrap(), want.to_vec().unwrap());
                assert!(g.iter().zip(&w).all(|(a, b)| (a - b).abs() < 1e-12), "{shape:?}: {g:?}, {w:?}");
                assert_eq!(got.shape(), if reduction == Reduction::None { t.shape() } else { &[] });
            }
            let likely = ClassesLast(NllLoss::default()).forward(&x.log_softmax(-1).unwrap(), &t).unwrap();
            let entropy = ClassesLast(CrossEntropyLoss::default()).forward(&x, &t).unwrap();
            assert!((likely.item::<f64>().unwrap() - entropy.item::<f64>().unwrap()).abs() < 1e-12);
        }
    }

    #[test]
    fn targets_that_fit_only_the_other_reading_name_the_loss_that_takes_them() {
        let (x, t) = (logits(&[2, 4, 3]), targets(&[2, 4]));
        for error in [CrossEntropyLoss::default().forward(&x, &t), NllLoss::default().forward(&x, &t)] {
            let text = error.unwrap_err().to_string();
            assert!(text.contains("[2, 4, 3]") && text.contains("wanted [2, 3]"), "{text}");
            assert!(text.contains("ClassesLast"), "{text}");
        }
        let error = CrossEntropyLoss::default().classes_last().forward(&x, &targets(&[2, 3])).unwrap_err();
        assert!(error.to_string().contains("[.., C]"), "{error}");
        assert!(CrossEntropyLoss::default().forward(&x, &targets(&[2, 3])).is_ok());
    }
}
