//! The frame format, bit by bit.
use proptest::prelude::*;
use shared::protocol::PROTOCOL_VERSION;
use shared::wire::frame::{
    BODY_MAX, CONTROL_MAX, FrameDecoder, FrameEncoder, FrameError, FrameKind, HANDSHAKE_MAX,
    HEADER_LEN, WELCOME_MAX,
};

fn encode(kind: FrameKind, epoch: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    FrameEncoder::default().encode(kind, epoch, body, &mut bytes).unwrap();
    bytes
}

fn decode(bytes: &[u8]) -> Result<Option<shared::wire::frame::Frame>, FrameError> {
    let mut decoder = FrameDecoder::default();
    decoder.feed(bytes);
    decoder.next_frame()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// CRC-32C, computed bit by bit as in RFC 3720, appendix B.4.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

#[test]
fn the_format_is_pinned() {
    let bytes = encode(FrameKind::Control, 0x0102_0304, b"body");
    let header = "545554491b0006000400000004030201000000000100000000000000";
    let mut plain = bytes[..28].to_vec();
    plain.extend_from_slice(b"body");
    let checksum = hex(&crc32c(&plain).to_le_bytes());
    assert_eq!(hex(&bytes), format!("{header}{checksum}626f6479"));
    assert_eq!((HEADER_LEN, PROTOCOL_VERSION), (32, 27), "changing these changes docs/protocol.md");
}

#[test]
fn every_flipped_bit_is_refused() {
    let bytes = encode(FrameKind::Step, 7, b"some body");
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        // A larger length waits for more bytes; whatever those are, the checksum then fails.
        flipped.extend_from_slice(&[0; 64]);
        match decode(&flipped) {
            Err(_) => {}
            Ok(None) => {
                flipped.resize(HEADER_LEN + BODY_MAX as usize, 0);
                assert!(decode(&flipped).is_err(), "bit {bit}");
            }
            Ok(Some(frame)) => panic!("bit {bit} gave {frame:?}"),
        }
    }
}

#[test]
fn truncated_frames_wait_and_bytes_may_come_one_by_one() {
    let bytes = encode(FrameKind::Step, 7, b"some body");
    for len in 0..bytes.len() {
        assert_eq!(decode(&bytes[..len]), Ok(None), "{len} bytes");
    }
    let mut decoder = FrameDecoder::default();
    for byte in &bytes[..bytes.len() - 1] {
        decoder.feed(&[*byte]);
        assert_eq!(decoder.next_frame(), Ok(None));
    }
    decoder.feed(&bytes[bytes.len() - 1..]);
    assert_eq!(decoder.next_frame().unwrap().unwrap().body, b"some body");
}

#[test]
fn a_lying_length_reserves_nothing() {
    let mut bytes = encode(FrameKind::Step, 0, b"");
    bytes[8..12].copy_from_slice(&BODY_MAX.to_le_bytes());
    let mut decoder = FrameDecoder::default();
    decoder.feed(&bytes);
    assert_eq!(decoder.next_frame(), Ok(None));
    assert!(decoder.capacity() < 4096, "{}", decoder.capacity());
    bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let expected =
        FrameError::TooLarge { kind: FrameKind::Step, len: u64::from(u32::MAX), max: BODY_MAX };
    assert_eq!(decode(&bytes), Err(expected));
}

#[test]
fn a_large_frame_leaves_no_large_buffer() {
    let mut encoder = FrameEncoder::default();
    let mut bytes = Vec::new();
    let body = vec![7; BODY_MAX as usize];
    encoder.encode(FrameKind::Step, 0, &body, &mut bytes).unwrap();
    encoder.encode(FrameKind::Step, 0, b"next", &mut bytes).unwrap();
    let mut decoder = FrameDecoder::default();
    let (first, rest) = bytes.split_at(bytes.len() - 2);
    for chunk in first.chunks(64 << 10) {
        decoder.feed(chunk);
    }
    assert_eq!(decoder.next_frame().unwrap().unwrap().body, body);
    assert_eq!(decoder.next_frame(), Ok(None), "the second is not whole yet");
    decoder.feed(rest);
    assert_eq!(decoder.next_frame().unwrap().unwrap().body, b"next");
    assert_eq!(decoder.next_frame(), Ok(None));
    assert!(decoder.capacity() <= 256 << 10, "{}", decoder.capacity());
}

#[test]
fn every_kind_has_its_bound_on_both_sides() {
    let bounds = [
        (FrameKind::Hello, HANDSHAKE_MAX),
        (FrameKind::Welcome, WELCOME_MAX),
        (FrameKind::Fetch, WELCOME_MAX),
        (FrameKind::Refused, HANDSHAKE_MAX),
        (FrameKind::Ping, 0),
        (FrameKind::Control, CONTROL_MAX),
        (FrameKind::Step, BODY_MAX),
    ];
    for (kind, max) in bounds {
        let body = vec![0; max as usize + 1];
        let mut out = Vec::new();
        let refused = FrameEncoder::default().encode(kind, 0, &body, &mut out);
        assert!(matches!(refused, Err(FrameError::TooLarge { .. })) && out.is_empty());
        assert!(decode(&encode(kind, 0, &body[1..])).unwrap().is_some());
    }
}

#[test]
fn strangers_and_other_versions_are_told_apart() {
    assert_eq!(decode(b"GET / HTTP/1.1\r\n"), Err(FrameError::HttpClient));
    assert_eq!(decode(b"HTTP/1.1 400 Bad Request\r\n"), Err(FrameError::HttpServer));
    assert_eq!(decode(b"\x15\x03\x03\x00\x02\x02\x32"), Err(FrameError::HttpServer), "TLS");
    assert!(matches!(decode(b"SSH-2.0-x"), Err(FrameError::BadMagic(_))));
    assert!(matches!(decode(b"\x16\x03"), Err(FrameError::BadMagic(_))), "before four bytes");
    let mut other = encode(FrameKind::Hello, 0, b"");
    other[4] = 99;
    let expected = FrameError::VersionMismatch { ours: PROTOCOL_VERSION, theirs: 99 };
    assert_eq!(decode(&other), Err(expected.clone()));
    assert!(expected.to_string().contains("run the same version on both"));
    for (at, value) in [(6, 0), (6, 99), (7, 1)] {
        let mut unknown = encode(FrameKind::Hello, 0, b"");
        unknown[at] = value;
        assert!(matches!(decode(&unknown), Err(FrameError::UnknownKind { .. })));
    }
}

#[test]
fn lost_and_repeated_frames_are_noticed() {
    let mut encoder = FrameEncoder::default();
    let mut frames = Vec::new();
    for _ in 0..3 {
        let mut bytes = Vec::new();
        encoder.encode(FrameKind::Ping, 0, b"", &mut bytes).unwrap();
        frames.push(bytes);
    }
    let mut decoder = FrameDecoder::default();
    decoder.feed(&frames[0]);
    assert!(decoder.next_frame().unwrap().is_some());
    decoder.feed(&frames[2]);
    assert_eq!(decoder.next_frame(), Err(FrameError::BadSequence { expected: 2, received: 3 }));
    let mut decoder = FrameDecoder::default();
    decoder.feed(&[frames[0].clone(), frames[0].clone()].concat());
    assert!(decoder.next_frame().unwrap().is_some());
    assert_eq!(decoder.next_frame(), Err(FrameError::BadSequence { expected: 2, received: 1 }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]
    #[test]
    fn random_bytes_never_panic_and_never_become_a_frame(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        begin_right in any::<bool>(),
    ) {
        let mut stream = if begin_right { b"TUTI\x01\x00\x06\x00".to_vec() } else { Vec::new() };
        stream.extend_from_slice(&bytes);
        let mut decoder = FrameDecoder::default();
        decoder.feed(&stream);
        // One in four billion would pass the checksum.
        prop_assert!(!matches!(decoder.next_frame(), Ok(Some(_))));
    }
}
