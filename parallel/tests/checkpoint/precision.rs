//! A bf16 model's f32 values, kept as master copies or as shares.

use phalanx_parallel::checkpoint::{self, Checkpoint, Trained};
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::sharded::{Stage, Zero, ZeroConfig};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::DType;

use crate::gpt::{self, bytes};
use crate::{Place, save, settings};

type State = Vec<(String, Vec<u8>)>;

/// Two steps over two ranks, from and to a checkpoint: the optimizer's whole state, masters included.
fn train(wide: bool, from: Option<&str>, to: Option<&str>, place: &Place) -> State {
    let run = |rank: launch::Rank| -> Result<State> {
        let model = gpt::model(DType::BF16, rank.device());
        let shard_dtype = wide.then_some(DType::F32);
        let grad_dtype = Some(DType::F32);
        let config = ZeroConfig { shard_dtype, grad_dtype, ..ZeroConfig::new(Stage::Parameters) };
        let zero = Zero::new(&model, rank.comm().clone(), config)?;
        let mut optimizer = gpt::optimizer(zero.parameters());
        let trained = [Trained { model: &model, share: &zero }];
        if let Some(from) = from {
            Checkpoint::open(place.join(from))?.restore(rank.comm(), &trained, &mut [&mut optimizer])?;
        }
        let begin = if from.is_some() { 2 } else { 0 };
        for step in begin..begin + 2 {
            zero.backward(&gpt::loss(&model, step, gpt::rows(2, rank.rank(), 1).remove(0))?)?;
            gpt::update(&mut optimizer, DataParallel::grad_norm(&zero)?)?;
            zero.updated()?;
        }
        if let Some(to) = to {
            save(&rank, &place.join(to), checkpoint::parts(&trained, &[&optimizer])?, &settings(2))?;
        }
        let mut state = bytes(&zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
        state.sort();
        Ok(state)
    };
    launch::threads(2, run).unwrap().swap_remove(0)
}

#[test]
fn shares_in_f32_and_master_copies_are_read_from_each_other() {
    let place = Place::new("precision");
    assert!(train(true, None, Some("wide"), &place) == train(false, None, Some("narrow"), &place));
    let wanted = train(true, Some("wide"), None, &place);
    for (wide, from) in [(true, "narrow"), (false, "wide"), (false, "narrow")] {
        assert!(train(wide, Some(from), None, &place) == wanted, "wide {wide}, from {from}");
    }
}

#[test]
fn nothing_is_rounded_where_the_bits_would_be_lost() {
    let place = Place::new("rounded");
    train(true, None, Some("wide"), &place);
    let run = |rank: launch::Rank| -> Result<String> {
        let model = gpt::model(DType::BF16, rank.device());
        let share = phalanx_parallel::data_parallel::Alone::new(&model);
        phalanx_nn::note_ranks(2); // as a rank that holds nothing
        let mut optimizer = phalanx_nn::Rule::init(phalanx_nn::Sgd::default(), vec![])?;
        let trained = [Trained { model: &model, share: &share }];
        let saved = Checkpoint::open(place.join("wide"))?;
        Ok(saved.restore(rank.comm(), &trained, &mut [&mut optimizer]).unwrap_err().to_string())
    };
    let error = launch::threads(1, run).unwrap().remove(0);
    assert!(error.contains("saved as f32, wanted bf16"), "{error}");
}
