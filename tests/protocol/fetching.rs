//! What workers are told to fetch, and how they say that they have.
use shared::hub::HubModel;
use shared::protocol::{TO_FETCH_MAX, ToFetch};
use shared::wire::codec;
use shared::wire::frame::WELCOME_MAX;

fn list(models: &[String], adapters: &[String]) -> ToFetch {
    ToFetch { models: models.to_vec(), adapters: adapters.to_vec() }
}

#[test]
fn the_longest_list_fits_into_its_frame() {
    let long = "n".repeat(96);
    let model = HubModel { name: format!("{long}/{long}"), commit: "a".repeat(40) }.to_string();
    assert!(HubModel::parse(&model).unwrap().is_ok());
    let all = vec![model; TO_FETCH_MAX];
    let list = list(&all, &all);
    let bytes = codec::encode(&list).unwrap();
    assert!(bytes.len() <= WELCOME_MAX as usize, "{}", bytes.len());
    assert_eq!(codec::decode_message::<ToFetch>(&bytes), Ok(list));
}

#[test]
fn lists_are_told_apart_and_an_empty_one_is_nobody_s() {
    let of = |model: &str, adapter: &str| {
        let some = |text: &str| Some(text.to_owned()).filter(|it| !it.is_empty());
        let (models, adapters): (Vec<_>, Vec<_>) =
            (some(model).into_iter().collect(), some(adapter).into_iter().collect());
        list(&models, &adapters).fingerprint()
    };
    assert_eq!(of("", ""), 0);
    let mut all = vec![of("a", ""), of("b", ""), of("a", "b"), of("ab", ""), of("b", "a")];
    assert!(!all.contains(&0));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 5);
}
