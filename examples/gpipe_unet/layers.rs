//! Layers that only this model has.

use phalanx::nn::{self, Entry, Module, Parameters};
use phalanx::parallel::pipeline::gpipe::{Batch, Layer, Skip, Skippable, Skips};
use phalanx::{Context, Var, kernels, parallel};

/// In training, each channel of each image is left out with probability `p`, and the others grow by `1 / (1 - p)`.
pub struct Dropout2d {
    pub p: f64,
    pub site: u64,
}

/// Each pixel twice in both directions.
pub struct Upsample;

/// Lets the image pass and stashes it.
pub struct Stash {
    pub level: usize,
}

/// Puts the stashed channels behind those that come, which get a margin of zeros if their image is smaller.
pub struct PopCat {
    pub level: usize,
}

macro_rules! without_parameters {
    ($($layer:ty),*) => {$(
        impl Parameters for $layer {
            fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
        }
    )*};
}

without_parameters!(Dropout2d, Upsample, Stash, PopCat);

impl Module for Dropout2d {
    fn forward(&self, x: &Var) -> nn::Result<Var> {
        if !Context::current().train {
            return Ok(x.clone());
        }
        let ones = kernels::full(&[x.shape()[0], x.shape()[1], 1, 1], 1.0, x.dtype(), x.device());
        Ok(x.mul(&Var::new(ones.map_err(nn::Error::from)?).dropout(self.p, self.site, None)?)?)
    }
}

impl Module for Upsample {
    fn forward(&self, x: &Var) -> nn::Result<Var> {
        let [n, c, h, w] = x.shape() else {
            let why = format!("got an input of shape {:?}, wanted [n, channels, h, w]", x.shape());
            return Err(nn::Error::invalid("Upsample", why));
        };
        let twice = x.reshape_to(&[*n, *c, *h, 1, *w, 1])?.broadcast_to(&[*n, *c, *h, 2, *w, 2])?;
        Ok(twice.reshape_to(&[*n, *c, 2 * h, 2 * w])?)
    }
}

fn skip(level: usize) -> Skip {
    Skip::new(format!("level {level}"))
}

impl Layer for Stash {
    fn run(&self, input: Batch, skips: &mut Skips) -> parallel::Result<Batch> {
        let image = input.one()?;
        skips.stash(&skip(self.level), image.clone())?;
        Ok(image.into())
    }

    fn skippable(&self) -> Skippable {
        Skippable::new().stash(skip(self.level))
    }
}

impl Layer for PopCat {
    fn run(&self, input: Batch, skips: &mut Skips) -> parallel::Result<Batch> {
        let image = input.one()?;
        let Some(skipped) = skips.pop(&skip(self.level))? else { return Ok(image.into()) };
        let margin = |dim: usize| (0, skipped.shape()[dim] as isize - image.shape()[dim] as isize);
        let image = match [margin(3), margin(2)] {
            [(0, 0), (0, 0)] => image,
            margins => image.pad(&margins, 0)?,
        };
        Ok(Var::cat(&[image, skipped], 1)?.into())
    }

    fn skippable(&self) -> Skippable {
        Skippable::new().pop(skip(self.level))
    }
}
