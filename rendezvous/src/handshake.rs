//! [`greet`] and [`Guest`]: the two ends of a connection prove to each other that they are of the same run, before either believes
//! anything that the other says.
//!
//! ```text
//! visitor                                                      host
//!    ──hello: rank, size, port, the visitor's nonce──────────►
//!    ◄─challenge: the host's nonce────────────────────────────   both now have the session's key,
//!    ──proof, and what a store has to know of the visitor─────►   HMAC-SHA256(secret, job and hello and nonce)
//!    ◄─accepted, or refused and why───────────────────────────
//! ```
//!
//! Every message but the hello has an HMAC-SHA256 under the session's key, which a process without the secret cannot make and which
//! fits no other connection. All sizes are bounded, and text is escaped and cut before it is shown.
//!
//! A run with TLS makes a TLS connection first, and all this inside it. Then the session's key also depends on the connection's own
//! secrets ([`Stream::binding`]), which a man in the middle has different for each end. Without TLS nothing is encrypted, and the
//! run's own messages, which follow, have no HMAC.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::opening::{TLS_RECORD, first_byte, open_tls, refuse_tls};
use crate::stream::{PAUSE, Stream, VANISHED, detect_vanished, fill, is_pending};
use crate::{Result, clean};

/// The first word of a hello, with the version of this protocol.
const MAGIC: u64 = u64::from_le_bytes(*b"phalanx2");
/// How long a connection may take to prove that it is a rank.
pub(super) const GREETING: Duration = Duration::from_secs(5);
/// Bytes of a message besides its content: kind, length, HMAC.
const FRAME: usize = 1 + 4 + 32;
/// Bytes of what a visitor says of itself beside the proof.
const INTRODUCTION_MAX: usize = 64;
/// Bytes of a content, unless it is the table of addresses.
pub(super) const CONTENT_MAX: usize = 4096;

type Nonce = [u8; 32];

/// What all processes of a run know, and others do not.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Empty if the run has none.
    pub secret: String,
    /// The name of the run.
    pub job: String,
    /// Whether connections are encrypted.
    pub tls: bool,
}

/// Without the secret.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let secret = if self.secret.is_empty() { "none" } else { "set" };
        f.debug_struct("Credentials")
            .field("secret", &secret)
            .field("job", &self.job)
            .field("tls", &self.tls)
            .finish()
    }
}

impl Credentials {
    /// From variables: `PHALANX_SECRET`, or the text in the file `PHALANX_SECRET_FILE`; `PHALANX_JOB`, or torchrun's name of the run;
    /// `PHALANX_TLS=1`.
    ///
    /// # Errors
    /// If both are set, the file cannot be read, the secret is empty, or `PHALANX_TLS` is neither 0 nor 1.
    pub fn find(variable: &impl Fn(&str) -> Option<String>) -> Result<Credentials> {
        let job = variable("PHALANX_JOB").or_else(|| variable("TORCHELASTIC_RUN_ID")).unwrap_or_default();
        let secret = match (variable("PHALANX_SECRET"), variable("PHALANX_SECRET_FILE")) {
            (Some(_), Some(_)) => {
                return Err("got PHALANX_SECRET and PHALANX_SECRET_FILE, wanted one of them"
                    .to_string()
                    .into());
            }
            (None, None) => String::new(),
            (Some(text), None) if text.trim().is_empty() => {
                return Err("PHALANX_SECRET is empty, wanted a text".to_string().into());
            }
            (Some(text), None) => text.trim().into(),
            (None, Some(path)) => match std::fs::read_to_string(&path) {
                Ok(text) if !text.trim().is_empty() => text.trim().into(),
                Ok(_) => return Err(format!("PHALANX_SECRET_FILE={path} is empty, wanted a text").into()),
                Err(e) => return Err(format!("PHALANX_SECRET_FILE={path}: {e}").into()),
            },
        };
        let tls = match variable("PHALANX_TLS").as_deref() {
            Some("1") => true,
            None | Some("" | "0") => false,
            Some(other) => return Err(format!("got PHALANX_TLS={other}, wanted 0 or 1").into()),
        };
        Ok(Credentials { secret, job, tls })
    }

    /// # Errors
    /// If TLS is wanted and this program has none, or there is no secret by which the ends of a connection could know each other.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.tls {
            true if cfg!(not(feature = "tls")) => {
                Err("TLS is on (PHALANX_TLS), and this program was built without its feature `tls`".into())
            }
            true if self.secret.is_empty() => {
                Err("TLS is on (PHALANX_TLS) and there is no secret, by which alone ranks know each other: \
                     set PHALANX_SECRET or PHALANX_SECRET_FILE"
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// Those of one meeting, of which the store has said this. No process of another one knows them.
    pub(super) fn of_meeting(&self, number: &str) -> Credentials {
        Credentials { job: format!("{} {number}", self.job), ..self.clone() }
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The host's nonce.
    Challenge,
    /// The visitor knows the secret.
    Proof,
    /// The host has entered the visitor.
    Accepted,
    /// The host gives up, or wants nothing of the visitor; the content is the reason.
    Refused,
    /// The numbers of the ranks that rank 0 waits for.
    Waiting,
    /// The addresses of all ranks.
    Table,
    /// A rank is connected with all others.
    Ready,
    /// All ranks are.
    Go,
    /// This meeting has failed: the visitor is to come to the store again. The content is the reason.
    Again,
    /// A rank has ended well. The store answers with the same once all ranks have, or with `Again`.
    Done,
    /// The launcher ends the run; the content is the reason.
    End,
    /// The launcher starts a rank no more: its number, and the reason.
    Lose,
    /// Processes wait that have no place in the running epoch.
    Change,
    /// A rank has waited too long, in ms, for others that had met it before. A launcher gets their numbers, too.
    Absent,
    /// The launcher starts a rank again after this time, in ms. Ranks that wait at the store get this, too.
    Pause,
}

const KINDS: [Kind; 15] = [
    Kind::Challenge,
    Kind::Proof,
    Kind::Accepted,
    Kind::Refused,
    Kind::Waiting,
    Kind::Table,
    Kind::Ready,
    Kind::Go,
    Kind::Again,
    Kind::Done,
    Kind::End,
    Kind::Lose,
    Kind::Change,
    Kind::Absent,
    Kind::Pause,
];

/// A visitor's first message.
#[derive(Clone, Copy, Debug)]
pub struct Hello {
    /// Its rank.
    pub rank: usize,
    /// The number of ranks, as it was told.
    pub size: usize,
    /// Where the visitor itself listens.
    pub port: u16,
}

/// Its bytes, with the nonce.
type HelloBytes = [u8; 64];

impl Hello {
    fn bytes(&self, nonce: &Nonce) -> HelloBytes {
        let mut bytes = [0; 64];
        let words = [MAGIC, self.rank as u64, self.size as u64, self.port.into()];
        bytes[..32].copy_from_slice(&words.map(u64::to_le_bytes).concat());
        bytes[32..].copy_from_slice(nonce);
        bytes
    }

    /// None if the bytes are no hello.
    fn of(bytes: &HelloBytes) -> Option<Hello> {
        let [magic, rank, size, port, ..] = bytes.as_chunks::<8>().0 else { return None };
        let [magic, rank, size, port] = [magic, rank, size, port].map(|word| u64::from_le_bytes(*word));
        let port = u16::try_from(port).ok().filter(|_| magic == MAGIC)?;
        Some(Hello { rank: rank as usize, size: size as usize, port })
    }
}

pub(super) fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(nonce)
}

/// A connection after its hello: its messages, each with an HMAC that has its place in the conversation.
pub struct Session {
    /// Its socket does not block until the meeting is over. Then it is the run's.
    pub stream: Stream,
    key: [u8; 32],
    is_host: bool,
    /// Messages so far, in each direction.
    sent: u64,
    received: u64,
    /// What has come of the next message.
    buffer: Vec<u8>,
}

/// Without the key.
impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("stream", &self.stream).finish_non_exhaustive()
    }
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    // HMAC takes a key of any length.
    Hmac::new_from_slice(key).unwrap_or_else(|_| unreachable!("a key of any length is one"))
}

impl Session {
    fn new(
        stream: Stream,
        known: &Credentials,
        hello: &HelloBytes,
        nonce: &Nonce,
        is_host: bool,
    ) -> io::Result<Session> {
        let mut mac = keyed(known.secret.as_bytes());
        for part in [known.job.as_bytes(), hello, nonce, &stream.binding()?] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        let key = mac.finalize().into_bytes().into();
        Ok(Session { stream, key, is_host, sent: 0, received: 0, buffer: Vec::new() })
    }

    /// The HMAC's state after a message, which the host has sent or not.
    fn mac(&self, by_host: bool, number: u64, message: &[u8]) -> Hmac<Sha256> {
        let mut mac = keyed(&self.key);
        mac.update(&[u8::from(by_host)]);
        mac.update(&number.to_le_bytes());
        mac.update(message);
        mac
    }

    /// Sends a message. It is small, so a socket that does not block takes it whole, or is broken.
    pub fn send(&mut self, kind: Kind, content: &[u8]) -> io::Result<()> {
        let number = KINDS.iter().position(|other| *other == kind).unwrap_or(0);
        let mut message = vec![number as u8];
        message.extend((content.len() as u32).to_le_bytes());
        message.extend(content);
        let mac = self.mac(self.is_host, self.sent, &message).finalize().into_bytes();
        message.extend(mac);
        self.sent += 1;
        self.stream.write_all(&message)
    }

    pub(super) fn send_pause(&mut self, pause: Duration) -> io::Result<()> {
        self.send(Kind::Pause, &(pause.as_millis() as u64).to_le_bytes())
    }

    /// [`Session::send`] of a content that the socket may not take whole at once.
    pub(super) fn send_long(&mut self, kind: Kind, content: &[u8]) -> io::Result<()> {
        self.stream.socket().set_nonblocking(false)?;
        self.stream.socket().set_write_timeout(Some(GREETING))?;
        self.send(kind, content)?;
        self.stream.socket().set_nonblocking(true)
    }

    /// The next message, if it has come whole; never more than it is read from the socket.
    ///
    /// # Errors
    /// If the connection has ended, or the message is not of this run or longer than `most`.
    pub fn receive(&mut self, most: usize) -> io::Result<Option<(Kind, Vec<u8>)>> {
        loop {
            let length =
                self.buffer.get(1..5).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
            let wanted = match length {
                None => 5,
                Some(length) if length as usize <= most => FRAME + length as usize,
                Some(_) => return Err(self.foreign()),
            };
            if length.is_some() && self.buffer.len() >= wanted {
                break;
            }
            if !fill(&mut self.stream, &mut self.buffer, wanted)? {
                return Ok(None);
            }
        }
        let buffer = std::mem::take(&mut self.buffer);
        let (message, mac) = buffer.split_at(buffer.len() - 32);
        // In constant time.
        let is_right = self.mac(!self.is_host, self.received, message).verify_slice(mac).is_ok();
        match KINDS.get(message[0] as usize).filter(|_| is_right) {
            Some(kind) => {
                self.received += 1;
                Ok(Some((*kind, message[5..].to_vec())))
            }
            None => {
                self.buffer = buffer;
                Err(self.foreign())
            }
        }
    }

    fn foreign(&self) -> io::Error {
        let begin = &self.buffer[..self.buffer.len().min(16)];
        let why = format!(
            "it is not of this run: another secret or job, or another program (it sent \"{}\")",
            begin.escape_ascii()
        );
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Whether the other end is there, as far as this one has heard.
    pub(super) fn is_alive(&self) -> bool {
        match self.stream.socket().peek(&mut [0]) {
            Ok(read) => read > 0,
            Err(error) => is_pending(&error),
        }
    }
}

/// What [`Session::send_pause`] has sent.
pub(super) fn pause(content: &[u8]) -> Duration {
    Duration::from_millis(content.try_into().map_or(0, u64::from_le_bytes))
}

/// The visitor's end. The socket blocks no longer afterwards. `None` if the host has closed the connection or was silent, so that
/// the visitor may try again.
///
/// # Errors
/// If what listens there is not of this run, or refuses this rank; why.
pub fn greet(
    socket: TcpStream,
    hello: &Hello,
    known: &Credentials,
    until: Instant,
) -> Result<Option<Session>, String> {
    greet_with(socket, hello, &[], known, until)
}

/// [`greet`], with what a store has to know of the visitor.
pub(super) fn greet_with(
    socket: TcpStream,
    hello: &Hello,
    introduction: &[u8],
    known: &Credentials,
    until: Instant,
) -> Result<Option<Session>, String> {
    known.check()?;
    let ready = socket.set_nodelay(true).and_then(|()| socket.set_nonblocking(true));
    let opened = match ready {
        Ok(()) if known.tls => open_tls(socket, until)?,
        ready => ready.ok().map(|()| Stream::Plain(socket)),
    };
    let Some(mut stream) = opened else { return Ok(None) };
    let begun = nonce().map(|nonce| hello.bytes(&nonce)).and_then(|bytes| {
        stream.write_all(&bytes)?;
        Ok(bytes)
    });
    let Ok(bytes) = begun else { return Ok(None) };
    // The key of the challenge's HMAC depends on the nonce in it.
    let mut challenge = Vec::new();
    let wanted = FRAME + size_of::<Nonce>();
    loop {
        match fill(&mut stream, &mut challenge, wanted) {
            Ok(true) => break,
            Ok(false) if Instant::now() < until => std::thread::sleep(PAUSE),
            _ if challenge.is_empty() => return Ok(None),
            _ => return Err(format!("it is no rank (it sent \"{}\")", challenge.escape_ascii())),
        }
    }
    let nonce: Nonce = challenge[5..37].try_into().unwrap_or_default();
    let Ok(mut session) = Session::new(stream, known, &bytes, &nonce, false) else { return Ok(None) };
    session.buffer = challenge;
    let mut is_proven = false;
    loop {
        match session.receive(CONTENT_MAX) {
            Ok(Some((Kind::Challenge, _))) if !is_proven => {
                is_proven = true;
                if session.send(Kind::Proof, introduction).is_err() {
                    return Ok(None);
                }
            }
            Ok(Some((Kind::Accepted, _))) if is_proven => return Ok(Some(session)),
            Ok(Some((Kind::Refused, why))) => return Err(clean(&why)),
            Ok(Some(_)) => return Err("it answers out of order".into()),
            Ok(None) if Instant::now() < until => std::thread::sleep(PAUSE),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(error.to_string()),
            Ok(None) | Err(_) => return Ok(None),
        }
    }
}

/// The host's end: a connection that may be a rank's.
pub(super) struct Guest {
    pub(super) from: SocketAddr,
    since: Instant,
    stage: Stage,
}

enum Stage {
    /// Nothing has come.
    Silent(TcpStream),
    /// What has come of the hello.
    Hello(Stream, Vec<u8>),
    Proof(Hello, Session),
    /// Taken by [`Guest::step`].
    Done,
}

/// What became of a guest.
pub(super) enum Step {
    /// More has to come.
    Wait,
    /// It is no rank of this run; or one that was told other things, and which.
    Stranger(Option<String>),
    /// It has proven that it is of this run, has said this of itself, and waits for an answer.
    Rank(Hello, Session, Vec<u8>),
}

impl Guest {
    pub(super) fn new(socket: TcpStream, from: SocketAddr) -> io::Result<Guest> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        detect_vanished(&socket, VANISHED)?;
        Ok(Guest { from, since: Instant::now(), stage: Stage::Silent(socket) })
    }

    /// Takes what has come, without waiting.
    pub(super) fn step(&mut self, known: &Credentials) -> Step {
        match self.advance(known) {
            Ok(Some((hello, session, introduction))) => Step::Rank(hello, session, introduction),
            Ok(None) if self.since.elapsed() < GREETING => Step::Wait,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                Step::Stranger(Some(error.to_string()))
            }
            _ => Step::Stranger(None),
        }
    }

    fn advance(&mut self, known: &Credentials) -> io::Result<Option<(Hello, Session, Vec<u8>)>> {
        let foreign = || io::Error::from(io::ErrorKind::InvalidData);
        loop {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Done) {
                Stage::Silent(socket) => match first_byte(&socket)? {
                    None => {
                        self.stage = Stage::Silent(socket);
                        return Ok(None);
                    }
                    Some(TLS_RECORD) if known.tls => Stage::Hello(Stream::tls_host(socket)?, Vec::new()),
                    Some(TLS_RECORD) => return Err(refuse_tls(socket, self.from)),
                    Some(_) => Stage::Hello(Stream::Plain(socket), Vec::new()),
                },
                Stage::Hello(mut stream, mut buffer) => {
                    if !stream.is_open()? || !fill(&mut stream, &mut buffer, size_of::<HelloBytes>())? {
                        self.stage = Stage::Hello(stream, buffer);
                        return Ok(None);
                    }
                    let bytes: HelloBytes = buffer[..].try_into().map_err(|_| foreign())?;
                    let (hello, nonce) = (Hello::of(&bytes).ok_or_else(foreign)?, nonce()?);
                    let mut session = Session::new(stream, known, &bytes, &nonce, true)?;
                    session.send(Kind::Challenge, &nonce)?;
                    Stage::Proof(hello, session)
                }
                Stage::Proof(hello, mut session) => match session.receive(INTRODUCTION_MAX)? {
                    Some((Kind::Proof, introduction)) => return Ok(Some((hello, session, introduction))),
                    Some(_) => return Err(foreign()),
                    None => {
                        self.stage = Stage::Proof(hello, session);
                        return Ok(None);
                    }
                },
                Stage::Done => return Err(foreign()),
            };
        }
    }
}
