//! [`Zero`] as one of the ways to train over ranks.

use phalanx_nn::autograd::Var;
use phalanx_nn::{Parameter, Parameters, Squares};

use super::{Gathered, Zero};
use crate::Result;
use crate::comm::Traffic;
use crate::data_parallel::{DataParallel, Entries, NoSync};
use crate::part::Part;

impl DataParallel for Zero {
    fn parameters(&self) -> Vec<Parameter> {
        Zero::parameters(self)
    }
    fn no_sync(&self) -> NoSync {
        Zero::no_sync(self)
    }
    fn zero_grad(&self) -> Result<()> {
        Zero::zero_grad(self)
    }
    fn begin(&self) -> Result<()> {
        Zero::begin(self)
    }
    fn finish(&self) -> Result<()> {
        Zero::finish(self)
    }
    fn backward(&self, loss: &Var) -> Result<()> {
        Zero::backward(self, loss)
    }
    fn grad_squares(&self) -> Result<Squares> {
        Zero::grad_squares(self)
    }
    fn updated(&self) -> Result<()> {
        Zero::updated(self)
    }
    fn traffic(&self) -> Traffic {
        Zero::traffic(self)
    }
    fn gathered(&self) -> Result<Option<Gathered>> {
        Zero::gathered(self).map(Some)
    }
    fn full_state_dict(&self, model: &dyn Parameters) -> Result<Entries> {
        self.check_model(model)?;
        Zero::full_state_dict(self)
    }
    fn load_full_state_dict(&self, model: &dyn Parameters, entries: Entries) -> Result<()> {
        self.check_model(model)?;
        Zero::load_full_state_dict(self, entries)
    }
    fn parts(&self, model: &dyn Parameters) -> Result<Vec<Part>> {
        self.check_model(model)?;
        Zero::sharded_state_dict(self)
    }
    fn reloaded(&self) -> Result<()> {
        self.core.updated(true)
    }
    fn full_optimizer_state(&self, own: Entries, kinds: &[&'static str]) -> Result<Entries> {
        Zero::full_optimizer_state(self, own, kinds)
    }
    fn part_of_optimizer_state(&self, whole: Entries) -> Result<Entries> {
        Zero::part_of_optimizer_state(self, whole)
    }
}
