//! Corpora of texts and of conversations.

use super::*;

#[test]
fn a_mixture_is_identified_by_its_weights_too() {
    let folder = std::env::temp_dir().join(format!("phalanx-corpus-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.join(name).display().to_string());
    [&a, &b].iter().for_each(|path| std::fs::write(path, path.repeat(9)).unwrap());
    let identity = |data: Vec<String>| {
        let config = CorpusConfig { data, context: 8, ..CorpusConfig::default() };
        Corpus::open(&config, None, || Ok(Default::default())).unwrap().data(256, 1).unwrap().1
    };
    let mixed = |weight: &str| identity(vec![a.clone(), format!("{b}={weight}")]);
    assert_eq!(mixed("1"), identity(vec![a.clone(), b.clone()]));
    assert_ne!(mixed("1"), mixed("2"));
    assert_eq!(identity(vec![a.clone()]), identity(vec![format!("{a}=2")]));
    std::fs::remove_dir_all(folder).unwrap();
}

#[cfg(feature = "chat")]
#[test]
fn conversations_go_with_a_folder_and_not_with_texts() {
    let folder = std::env::temp_dir().join(format!("phalanx-corpus-chat-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.join(name), text).unwrap();
        folder.join(name).display().to_string()
    };
    file("chat_template.jinja", "{% for m in messages %}{{ m.content }};{% endfor %}");
    let (one, two) = (r#"{"prompt": "a", "completion": "b"}"#, r#"{"prompt": "a", "completion": "bcd"}"#);
    let data = file("chat.jsonl", &format!("{one}\n{two}\n{one}\n"));
    let text = file("text.txt", &"text".repeat(20));
    let open = |config: CorpusConfig, codec: Option<Codec>| {
        let config = CorpusConfig { context: 6, ..config };
        Corpus::open(&config, codec, || Ok(Default::default()))
    };
    let of = |data: &[&String]| {
        let data = data.iter().map(ToString::to_string).collect();
        CorpusConfig { data, ..CorpusConfig::default() }
    };
    let codec = || Some(Codec::of(&folder).unwrap());
    let corpus = open(CorpusConfig { validation: vec![data.clone()], ..of(&[&data]) }, codec()).unwrap();
    assert_eq!(corpus.summaries().len(), 2);
    let (found, identity, bytes) = corpus.data(256, 1).unwrap();
    assert!(identity.starts_with("3 conversations ") && bytes.is_none(), "{identity}");
    let mut counts: Vec<_> = (0..3).map(|number| found.samples.counted(number).unwrap()).collect();
    counts.sort_unstable();
    assert_eq!((counts, found.counted), (vec![2, 2, 4], 6));
    let held_out = found.validation.unwrap();
    assert_eq!((held_out.len(), held_out.counted(1)), (3, Some(4)));
    assert!(corpus.data(99, 1).err().unwrap().to_string().contains("got token 100, wanted one of"));
    assert_eq!(
        open(of(&[&data, &data]), codec()).unwrap().data(256, 1).unwrap().0.samples.counted(3).map(|n| n > 1),
        Some(true)
    );

    let refused = |config: CorpusConfig, codec: Option<Codec>| {
        let data = open(config, codec).and_then(|corpus| corpus.data(256, 1));
        data.err().unwrap().to_string()
    };
    assert!(refused(of(&[&data]), None).contains("conversations go with a model's folder"));
    let end = CorpusConfig { packed: true, end_of_text: Some(3), ..of(&[&data]) };
    assert!(refused(end, codec()).contains("`end-of-text` is for texts"));
    let packed = open(CorpusConfig { packed: true, ..of(&[&data]) }, codec()).unwrap();
    let (found, identity, _) = packed.data(256, 1).unwrap();
    assert!(identity.ends_with(" packed None"), "{identity}");
    assert_eq!(found.samples.sample(0).unwrap().len(), 3);
    assert!(refused(of(&[&data, &text]), codec()).contains("whose samples count unlike often"));
    std::fs::remove_dir_all(folder).unwrap();
}
