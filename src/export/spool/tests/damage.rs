//! Files that are damaged, cut, missing, misnamed or too many.

use std::collections::{BTreeMap, BTreeSet};

use super::model::Model;
use super::*;
use crate::export::seen::FingerprintKey;
use crate::export::spool::format::{HEADER, Header, Kind, RECORD, segment_name, write_record};
use crate::export::spool::positions::Positions;

fn open_model(model: &Model) -> (Spool, SpoolMetrics) {
    let metrics = SpoolMetrics::default();
    let files = Arc::new(model.clone());
    (Spool::open_files(Some(files), config(SpoolSync::Write), 0, metrics.clone()).unwrap(), metrics)
}

/// A spool of some segments: the files, and where in which of them each event is.
async fn written() -> (BTreeMap<String, Vec<u8>>, Vec<(String, std::ops::Range<usize>)>) {
    let model = Model::default();
    let (spool, _) = open_model(&model);
    let _hold = spool.hold(0);
    for n in 0..60 {
        spool.append(events(n * 5..n * 5 + 5)).await.unwrap();
    }
    settled(&spool).await;
    let files: BTreeMap<_, _> =
        model.names().into_iter().map(|name| (name.clone(), model.content(&name))).collect();
    assert!(files.len() >= 4, "{:?}", files.keys());
    let mut places = Vec::new();
    for (name, content) in &files {
        let mut at = HEADER;
        while at < content.len() {
            let length = 8 + u32::from_le_bytes(content[at..at + 4].try_into().unwrap()) as usize;
            if content[at + 16] == 0 {
                places.push((name.clone(), at..at + length));
            }
            at += length;
        }
    }
    assert_eq!(places.len(), 300);
    (files, places)
}

fn model_of(files: &BTreeMap<String, Vec<u8>>) -> Model {
    let model = Model::default();
    files.iter().for_each(|(name, content)| model.put(name, content.clone()));
    model
}

#[tokio::test]
async fn whatever_is_damaged_the_rest_is_read_and_what_is_lost_is_counted() {
    let (files, places) = written().await;
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut damaged = files.clone();
        let names: Vec<String> = files.keys().cloned().collect();
        for _ in 0..random.usize(1..6) {
            let name = random.choice(&names).unwrap();
            let content = damaged.get_mut(name).unwrap();
            if random.u8(0..4) == 0 {
                content.truncate(random.usize(0..=content.len()));
            } else if !content.is_empty() {
                let at = random.usize(0..content.len());
                content[at] ^= 1 << random.u8(0..8);
            }
        }
        let (spool, metrics) = open_model(&model_of(&damaged));
        let _hold = spool.hold(0);
        let found = read(&spool, 0).await;
        let read_numbers: BTreeSet<u64> = found.iter().map(|(number, _)| *number).collect();
        for (number, (name, place)) in (0..).zip(&places) {
            let is_intact = damaged[name].get(place.clone()) == Some(&files[name][place.clone()]);
            assert!(!is_intact || read_numbers.contains(&number), "seed {seed}: {number} is missing");
        }
        assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "seed {seed}: {found:?}");
        assert!(found.iter().all(|(number, id)| number.to_string() == *id), "seed {seed}: {found:?}");
        let lost = (spool.first()..spool.end()).filter(|number| !read_numbers.contains(number)).count();
        assert_eq!(metrics.lost_events.get(), lost as u64, "seed {seed}: counted");
        // Another reader doesn't count it again.
        read(&spool, 0).await;
        assert_eq!(metrics.lost_events.get(), lost as u64, "seed {seed}: counted once");
        assert_eq!(spool.append(vec![event("new")]).await.unwrap().new, 1, "seed {seed}: goes on");
        assert_eq!(read(&spool, spool.end() - 1).await, [(spool.end() - 1, "new".to_owned())]);
    }
}

#[tokio::test]
async fn strange_files_never_keep_a_spool_from_opening() {
    let (files, places) = written().await;
    let mut strange = files.clone();
    let names: Vec<String> = files.keys().cloned().collect();
    let missing = places.iter().filter(|(name, _)| *name == names[1]).count();
    strange.remove(&names[1]);
    strange.insert("notes.txt".to_owned(), b"x".to_vec());
    strange.insert("7.log".to_owned(), files[&names[0]].clone());
    strange.insert("00000000000000000003.log.damaged-8".to_owned(), b"x".to_vec());
    strange.insert(segment_name(400), Vec::new());
    let model = model_of(&strange);
    let (spool, metrics) = open_model(&model);
    let _hold = spool.hold(0);
    assert_eq!(read(&spool, 0).await.len(), 300 - missing);
    assert_eq!(metrics.lost_events.get(), missing as u64);
    assert_eq!(spool.end(), 400, "no number is given twice");
    spool.append(vec![event("new")]).await.unwrap();
    let kept = model.names();
    assert!(["notes.txt", "7.log"].iter().all(|name| kept.iter().any(|other| other == name)), "{kept:?}");
}

#[tokio::test]
async fn a_last_file_without_anything_readable_is_kept_and_its_number_not_given_again() {
    let (mut files, _) = written().await;
    files.insert(segment_name(400), vec![7; 100]);
    files.insert("00000000000000000003.log.damaged-8".to_owned(), b"x".to_vec());
    let model = model_of(&files);
    let (spool, metrics) = open_model(&model);
    let _hold = spool.hold(0);
    assert_eq!((metrics.cut_bytes.get(), spool.end()), (100, 400));
    assert_eq!(model.content(&format!("{}.damaged-9", segment_name(400))), [7; 100]);
    spool.append(vec![event("new")]).await.unwrap();
    assert_eq!(read(&spool, 0).await.len(), 301);
    assert_eq!(metrics.lost_events.get(), 0, "what comes after the last event was never there");
}

#[tokio::test]
async fn numbers_that_a_later_file_has_are_read_from_that() {
    let mut first = Vec::new();
    Header { first: 0, follows: 0 }.write(&mut first);
    for n in 0..4_u64 {
        write_record(&mut first, n, Kind::Event, event(&format!("old-{n}")).as_bytes());
    }
    let mut second = Vec::new();
    Header { first: 2, follows: 2 }.write(&mut second);
    write_record(&mut second, 2, Kind::Event, event("new-2").as_bytes());
    let model = Model::default();
    model.put(&segment_name(0), first);
    model.put(&segment_name(2), second);
    let (spool, metrics) = open_model(&model);
    let found: Vec<_> = read(&spool, 0).await.into_iter().map(|(_, id)| id).collect();
    assert_eq!((found, metrics.lost_events.get()), (vec!["old-0".into(), "old-1".into(), "new-2".into()], 0));
    // What was ignored isn't known either.
    assert_eq!(spool.append(vec![event("old-3")]).await.unwrap().new, 1);
}

#[tokio::test]
async fn a_torn_end_is_cut_and_counted() {
    let (mut files, _) = written().await;
    let (name, content) =
        files.iter_mut().next_back().map(|(name, content)| (name.clone(), content)).unwrap();
    let length = content.len();
    content.extend_from_slice(&[200, 0, 0, 0, 1, 2, 3]);
    let model = model_of(&files);
    let (spool, metrics) = open_model(&model);
    assert_eq!((metrics.cut_bytes.get(), model.content(&name).len()), (7, length));
    assert_eq!(spool.end(), 300);
}

#[tokio::test]
async fn a_record_that_is_no_event_is_lost_and_no_obstacle() {
    let mut content = Vec::new();
    Header { first: 0, follows: 0 }.write(&mut content);
    write_record(&mut content, 0, Kind::Event, event("0").as_bytes());
    write_record(&mut content, 1, Kind::Event, br#"{"aep":"9.9"}"#);
    write_record(&mut content, 2, Kind::Event, event("2").as_bytes());
    let model = Model::default();
    model.put(&segment_name(0), content);
    let (spool, metrics) = open_model(&model);
    assert_eq!(read(&spool, 0).await, numbered([0, 2]));
    assert_eq!(metrics.lost_events.get(), 1);
}

#[tokio::test]
async fn nothing_within_a_payload_passes_for_a_record() {
    // A record whose bytes are all ASCII, so that a session can have it for its name.
    let forged = (0..)
        .map(|n| {
            let mut record = Vec::new();
            write_record(
                &mut record,
                1,
                Kind::Event,
                event(&format!("forged-{n}-{}", "x".repeat(120))).as_bytes(),
            );
            record
        })
        .find(|record| record.is_ascii())
        .unwrap();
    let name = String::from_utf8(forged.clone()).unwrap();
    let mut positions = Positions::new(FingerprintKey([0; 16]), 1 << 20);
    positions.reach(&in_session("host", &name, 1));
    // The record that it stands in is damaged, so that the next one is searched for.
    let read_with = async |payload: &[u8]| {
        let mut content = Vec::new();
        Header { first: 0, follows: 0 }.write(&mut content);
        write_record(&mut content, 0, Kind::Positions, payload);
        content[HEADER + 4] ^= 1;
        write_record(&mut content, 2, Kind::Event, event("2").as_bytes());
        let model = Model::default();
        model.put(&segment_name(0), content);
        read(&open_model(&model).0, 0).await.len()
    };
    assert_eq!(read_with(&positions.snapshot()).await, 1);
    assert_eq!(read_with(&forged).await, 2, "were names written as they are");
}

#[tokio::test]
async fn a_damaged_file_is_kept_when_its_turn_to_go_comes() {
    let (mut files, _) = written().await;
    let names: Vec<String> = files.keys().cloned().collect();
    files.get_mut(&names[0]).unwrap()[HEADER + RECORD + 40] ^= 1;
    let model = model_of(&files);
    let (spool, metrics) = open_model(&model);
    let hold = spool.hold(0);
    read(&spool, 0).await;
    assert!(metrics.lost_events.get() > 0);
    hold.advance(300);
    settled(&spool).await;
    let kept = model.names();
    assert!(kept.iter().any(|name| *name == format!("{}.damaged-1", names[0])), "{kept:?}");
    assert!(!kept.contains(&names[0]) && !kept.contains(&names[1]), "{kept:?}");
}
