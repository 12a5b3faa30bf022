//! Nothing from peers without the cluster secret is decoded, and frames cannot be forged, changed,
//! repeated or reflected.
use std::slice::from_ref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use shared::actor::link::{CloseReason, Connection, LinkEvent};
use shared::actor::liveness::LivenessConfig;
use shared::clock::SystemClock;
use shared::wire::auth::{
    self, AuthError, GREETING_LEN, MacKey, NONCE_LEN, PROOF_LEN, Secret, SessionKeys, TAG_LEN,
};
use shared::wire::frame::{Frame, FrameDecoder, FrameEncoder, FrameError, FrameKind, HEADER_LEN};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::unbounded_channel;

const DEADLINE: Duration = Duration::from_secs(3);

fn secret(fill: u8) -> Secret {
    Secret::new(&[fill; 32]).unwrap()
}

/// Both sides' keys after an undisturbed handshake.
fn session(client: &Secret, server: &Secret) -> Result<(SessionKeys, SessionKeys), AuthError> {
    let (a, b) = ([1; NONCE_LEN], [2; NONCE_LEN]);
    let greeting = auth::greeting(&a);
    let challenge = auth::challenge(server, &greeting, &b)?;
    let (proof, client_keys) = auth::prove(from_ref(client), &greeting, &challenge)?;
    let server_keys = auth::verify(server, &greeting, &b, &proof)?;
    Ok((client_keys, server_keys))
}

#[test]
fn a_secret_is_long_enough_and_not_shown() {
    assert_eq!(Secret::new(b"short").unwrap_err(), AuthError::ShortSecret(5));
    assert_eq!(Secret::new(&[b' '; 64]).unwrap_err(), AuthError::ShortSecret(0));
    let message = AuthError::ShortSecret(5).to_string();
    assert!(message.contains("5 bytes") && message.contains("32"), "{message}");
    assert!(!format!("{:?}", secret(b'x')).contains('x'));
    // Random bytes may begin with what looks like white space.
    assert!(Secret::new(&[&[9; 1][..], &[200; 31]].concat()).is_ok());
    // A trailing newline of the file does not count.
    let (a, b) = (Secret::new(&[b'k'; 40]), Secret::new(&[&[b'k'; 40][..], b"\n"].concat()));
    assert!(session(&a.unwrap(), &b.unwrap()).is_ok());
}

#[test]
fn only_the_same_secret_gets_in_and_keys_differ_by_direction() {
    let (client, server) = session(&secret(1), &secret(1)).unwrap();
    let tag = |key: &MacKey| key.tag(b"header", b"body");
    assert_eq!(tag(&client.send), tag(&server.receive));
    assert_eq!(tag(&client.receive), tag(&server.send));
    assert_ne!(tag(&client.send), tag(&client.receive));
    assert_eq!(session(&secret(1), &secret(2)).unwrap_err(), AuthError::WrongSecret);
}

/// The proof can be recomputed from its description, here with Python: `hmac.new(sha256(b"k" *
/// 32).digest(), b"tutti server" + greeting + nonce, sha256)`.
#[test]
fn the_tag_is_hmac_sha_256_as_python_computes_it() {
    let secret = Secret::new(&[b'k'; 32]).unwrap();
    let greeting = auth::greeting(&[3; NONCE_LEN]);
    let challenge = auth::challenge(&secret, &greeting, &[4; NONCE_LEN]).unwrap();
    let hex: String = challenge[NONCE_LEN..].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN);
}

/// See [`the_tag_is_hmac_sha_256_as_python_computes_it`].
const GOLDEN: &str = "650351d7a41935fe9e6077e5c16e871527173b4c83516f3b97cb1fb23d3e51a5";

/// While a secret is replaced by another, step by step and everywhere in another order.
#[test]
fn who_dials_takes_a_proof_by_any_of_its_secrets() {
    let (old, new) = (secret(1), secret(2));
    let [a, b] = [[1; NONCE_LEN], [2; NONCE_LEN]];
    let meets = |client: &[&Secret], server: &Secret| {
        let greeting = auth::greeting(&a);
        let challenge = auth::challenge(server, &greeting, &b).unwrap();
        let client: Vec<Secret> = client.iter().copied().cloned().collect();
        let (proof, keys) = auth::prove(&client, &greeting, &challenge)?;
        let accepted = auth::verify(server, &greeting, &b, &proof)?;
        let tags = (keys.send.tag(b"h", b"b"), accepted.receive.tag(b"h", b"b"));
        assert_eq!(tags.0, tags.1, "both have the keys of the same secret");
        Ok::<(), AuthError>(())
    };
    for client in [&[&old][..], &[&old, &new], &[&new, &old]] {
        assert_eq!(meets(client, &old), Ok(()), "the old one is first there");
    }
    for client in [&[&old, &new][..], &[&new, &old], &[&new]] {
        assert_eq!(meets(client, &new), Ok(()), "the new one is first there");
    }
    assert_eq!(meets(&[&old], &new), Err(AuthError::WrongSecret), "it was not told of it");
    assert_eq!(meets(&[&new], &old), Err(AuthError::WrongSecret));
    assert_eq!(meets(&[], &old), Err(AuthError::WrongSecret));
}

#[test]
fn an_old_proof_is_worth_nothing() {
    let secret = secret(1);
    let greeting = auth::greeting(&[1; NONCE_LEN]);
    let challenge = auth::challenge(&secret, &greeting, &[2; NONCE_LEN]).unwrap();
    let (proof, _) = auth::prove(from_ref(&secret), &greeting, &challenge).unwrap();
    // The server uses a new nonce for every connection.
    let again = auth::verify(&secret, &greeting, &[3; NONCE_LEN], &proof);
    assert_eq!(again.unwrap_err(), AuthError::WrongSecret);
    // The server's own proof, reflected to it, is not a client's.
    let reflected: [u8; PROOF_LEN] = challenge[NONCE_LEN..].try_into().unwrap();
    let reflected = auth::verify(&secret, &greeting, &[2; NONCE_LEN], &reflected);
    assert_eq!(reflected.unwrap_err(), AuthError::WrongSecret);
}

fn coder() -> (FrameEncoder, FrameDecoder, SessionKeys) {
    let (client, server) = session(&secret(1), &secret(1)).unwrap();
    let (mut encoder, mut decoder) = (FrameEncoder::default(), FrameDecoder::default());
    encoder.set_key(client.send.clone());
    decoder.set_key(server.receive);
    (encoder, decoder, client)
}

fn encode(encoder: &mut FrameEncoder, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encoder.encode(FrameKind::Step, 7, body, &mut bytes).unwrap();
    bytes
}

#[test]
fn authenticated_frames_arrive_and_are_as_long_as_the_page_says() {
    let (mut encoder, mut decoder, _) = coder();
    for body in [&b"one"[..], b"", b"three"] {
        let bytes = encode(&mut encoder, body);
        assert_eq!(bytes.len(), HEADER_LEN + body.len() + TAG_LEN);
        for byte in bytes {
            decoder.feed(&[byte]);
        }
        let frame = Frame { kind: FrameKind::Step, epoch: 7, body: body.to_vec() };
        assert_eq!(decoder.next_frame().unwrap(), Some(frame));
    }
}

/// Corrects the checksum of a changed frame, as an attacker would.
fn forge(bytes: &mut [u8]) {
    let body_end = bytes.len() - TAG_LEN;
    let checksum =
        crc32c::crc32c_append(crc32c::crc32c(&bytes[..28]), &bytes[HEADER_LEN..body_end]);
    bytes[28..32].copy_from_slice(&checksum.to_le_bytes());
}

proptest! {
    #[test]
    fn no_changed_frame_is_taken(at in 0usize..HEADER_LEN + 9 + TAG_LEN, change in 1u8..) {
        let (mut encoder, mut decoder, _) = coder();
        let mut bytes = encode(&mut encoder, b"some body");
        // The length must not change, or the rest never arrives.
        prop_assume!(!(8..12).contains(&at));
        bytes[at] ^= change;
        forge(&mut bytes);
        decoder.feed(&bytes);
        match decoder.next_frame() {
            Err(_) => {}
            // The change was to the checksum itself, which the forgery has corrected.
            Ok(Some(frame)) => prop_assert!((28..32).contains(&at) && frame.body == b"some body"),
            Ok(None) => prop_assert!(false, "nothing came"),
        }
    }
}

#[test]
fn repeated_reordered_turned_and_plain_frames_are_refused() {
    let error = |bytes: &[u8]| {
        let (_, mut decoder, _) = coder();
        decoder.feed(bytes);
        decoder.next_frame().unwrap_err()
    };
    let (mut encoder, mut decoder, client) = coder();
    let (first, second) = (encode(&mut encoder, b"1"), encode(&mut encoder, b"2"));
    decoder.feed(&first);
    decoder.next_frame().unwrap();
    decoder.feed(&first);
    assert!(matches!(
        decoder.next_frame(),
        Err(FrameError::BadSequence { expected: 2, received: 1 })
    ));
    assert!(matches!(error(&second), FrameError::BadSequence { expected: 1, received: 2 }));
    let mut other_way = FrameEncoder::default();
    other_way.set_key(client.receive);
    assert_eq!(error(&encode(&mut other_way, b"1")), FrameError::BadTag);
    let plain = encode(&mut FrameEncoder::default(), b"1");
    assert!(matches!(error(&plain), FrameError::UnknownKind { flags: 0, .. }));
    // Conversely, a frame with a tag is unreadable without a key.
    let mut keyless = FrameDecoder::default();
    keyless.feed(&first);
    assert!(matches!(keyless.next_frame(), Err(FrameError::UnknownKind { flags: 1, .. })));
}

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (dialled, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (dialled.unwrap(), accepted.unwrap().0)
}

#[tokio::test]
async fn links_authenticate_over_sockets() {
    let (a, b) = sockets().await;
    let (mut a, mut b) = (Connection::new(a).unwrap(), Connection::new(b).unwrap());
    let key = secret(200);
    let (client, server) = tokio::join!(
        a.authenticate_as_client(from_ref(&key), DEADLINE),
        b.authenticate_as_server(&key, DEADLINE)
    );
    client.unwrap();
    server.unwrap();
    let (sender, mut events) = unbounded_channel();
    let clock = Arc::new(SystemClock::start());
    let a = a.start(LivenessConfig::default(), clock.clone(), |_| true);
    let _b = b.start(LivenessConfig::default(), clock, move |event| sender.send(event).is_ok());
    a.tell(FrameKind::Control, 3, Arc::new(b"hello".to_vec())).unwrap();
    let event = tokio::time::timeout(DEADLINE, events.recv()).await.unwrap().unwrap();
    assert!(matches!(event, LinkEvent::Frame(frame) if frame.body == b"hello"));
}

#[tokio::test]
async fn a_wrong_secret_is_noticed_by_the_client_first() {
    let (a, b) = sockets().await;
    let (mut a, mut b) = (Connection::new(a).unwrap(), Connection::new(b).unwrap());
    let (mine, theirs) = (secret(1), secret(2));
    let client = async {
        let result = a.authenticate_as_client(from_ref(&mine), DEADLINE).await;
        drop(a);
        result
    };
    let (client, server) = tokio::join!(client, b.authenticate_as_server(&theirs, DEADLINE));
    assert!(matches!(client, Err(CloseReason::Auth(AuthError::WrongSecret))), "{client:?}");
    assert!(server.is_err(), "it got no proof");
}

#[tokio::test]
async fn an_http_server_is_no_coordinator_with_another_secret() {
    let key = secret(1);
    // Shorter and longer than a challenge; an HTTPS port's answer to bytes that are not TLS.
    let answers: [&[u8]; 3] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\ndate: now\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x32",
    ];
    for answer in answers {
        let (a, mut server) = sockets().await;
        server.write_all(answer).await.unwrap();
        server.shutdown().await.unwrap();
        let mut a = Connection::new(a).unwrap();
        let result = a.authenticate_as_client(from_ref(&key), DEADLINE).await;
        let Err(reason) = result else { panic!("it has no secret") };
        assert!(matches!(reason, CloseReason::Frame(FrameError::HttpServer)), "{reason}");
        assert!(reason.lasts(), "who dials there dials there for ever");
    }
}

#[tokio::test]
async fn strangers_are_cut_after_four_bytes_or_at_the_deadline() {
    let key = secret(1);
    let (mut stranger, b) = sockets().await;
    let mut b = Connection::new(b).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let result = b.authenticate_as_server(&key, DEADLINE).await;
    assert!(matches!(result, Err(CloseReason::Frame(FrameError::HttpClient))), "{result:?}");

    let (mut stranger, b) = sockets().await;
    let mut b = Connection::new(b).unwrap();
    stranger.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    let result = b.authenticate_as_server(&key, DEADLINE).await;
    let foreign = |it: &CloseReason| matches!(it, CloseReason::Frame(FrameError::BadMagic(_)));
    assert!(result.as_ref().is_err_and(foreign), "{result:?}");

    // A process of the cluster, without the secret.
    let (mut stranger, b) = sockets().await;
    let mut b = Connection::new(b).unwrap();
    stranger.write_all(b"TUTI").await.unwrap();
    let result = b.authenticate_as_server(&key, DEADLINE).await;
    assert!(matches!(result, Err(CloseReason::Auth(AuthError::NoGreeting))), "{result:?}");

    let (mut silent, b) = sockets().await;
    let mut b = Connection::new(b).unwrap();
    silent.write_all(&auth::greeting(&[0; NONCE_LEN])[..GREETING_LEN - 1]).await.unwrap();
    let began = Instant::now();
    let short = Duration::from_millis(200);
    let result = b.authenticate_as_server(&key, short).await;
    assert!(matches!(result, Err(CloseReason::Silent { .. })), "{result:?}");
    assert!(began.elapsed() < DEADLINE);
    let mut nothing = [0; 1];
    drop(b);
    assert_eq!(silent.read(&mut nothing).await.unwrap_or(0), 0, "and was told nothing");
}
