//! Processes that have a model in parts write a text together, and all end when one of them dies.

use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_nn::Scope;
use phalanx_nn::models::{Generation, generate_rows, save_model};
use phalanx_parallel::hybrid::Layout;
use phalanx_tensor::{DType, Device};
use phalanx_train::{Result, generate_saved};

use super::port::free_port;
use super::{Folder, model, outcomes, rank};

fn letters(tokens: &[u32]) -> String {
    tokens.iter().map(|&token| char::from(b'a' + token as u8)).collect()
}

/// One rank: continues prompts with the model of a folder.
pub fn write(folder: &Path) -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse::<usize>().ok());
    let (dies, texts) =
        (number("ABORTS").is_some_and(|rank| number("RANK") == Some(rank)), AtomicUsize::new(0));
    let text = |tokens: &[u32]| {
        if dies && texts.fetch_add(1, Ordering::Relaxed) > 3 {
            std::process::abort();
        }
        letters(tokens)
    };
    let layout = Layout { tp: 2, pp: number("WORLD_SIZE").unwrap() / 2, ..Layout::default() };
    let generation = || Generation::new(40).with_text(text, &[]);
    let rows =
        generate_saved(folder, layout, DType::F32, &[vec![1], vec![2, 3]], generation, |_| true, |_| ())?;
    rows.iter().flatten().for_each(|row| println!("\nwrote {}", row.text));
    Ok(())
}

#[test]
fn processes_write_a_text_together_and_end_with_an_error_when_one_of_them_dies() {
    let folder = Folder::new("generate");
    let alone = model().init(&Scope::new(3, DType::F32, Device::CPU)).unwrap();
    save_model(&alone, &model(), &folder.0).unwrap();
    let prompts = [vec![1], vec![2, 3]];
    let wanted = generate_rows(&alone, &prompts, Generation::new(40), |_| true).unwrap();
    let wanted: Vec<String> = wanted.iter().map(|row| letters(&row.tokens)).collect();
    let rank = rank("").with("GENERATE", folder.path(""));
    let port = free_port();
    let children: Vec<Child> = (0..4).map(|number| rank.start(number, 4, port)).collect();
    for (number, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let written: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("wrote ")).collect();
        assert!(said.contains("\nended well"), "{output:?}");
        assert!(
            if number == 0 { written == wanted } else { written.is_empty() },
            "rank {number}: {written:?}"
        );
    }
    for lost in 0..4 {
        let outcomes = outcomes(&vec![rank.clone().with("ABORTS", lost.to_string()); 4]);
        for (number, said) in outcomes.iter().enumerate().filter(|(number, _)| *number != lost) {
            assert!(
                said.contains("with: ") && said.contains(&format!("rank {lost}")),
                "{lost}, {number}: {said}"
            );
        }
    }
}
