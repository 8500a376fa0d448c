//! [`TlsStream`]: TLS 1.3 over a socket, and its two halves, [`TlsReader`] and [`TlsWriter`].
//!
//! No certificate says who the other end is: each process makes a key when it starts, and every key is taken. The handshake that
//! follows inside the connection proves that the other end knows the run's secret, and that it has the same [`TlsStream::binding`]:
//! a man in the middle has another connection with each end, so two bindings, and cannot make a proof for either.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig, ServerConnection,
    SignatureScheme,
};

use crate::stream::is_pending;

/// Bytes that are encrypted or decrypted at once, while the other half waits.
const PIECE: usize = 64 << 10;

/// How this process makes TLS connections, as a visitor and as a host.
struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// Made once, with a key of this process alone.
fn configs() -> io::Result<&'static Configs> {
    static CONFIGS: OnceLock<Result<Configs, String>> = OnceLock::new();
    let made = CONFIGS.get_or_init(|| make().map_err(|error| format!("TLS cannot begin: {error}")));
    made.as_ref().map_err(|why| io::Error::other(why.clone()))
}

fn make() -> Result<Configs, rustls::Error> {
    let random = |_| rustls::Error::FailedToGetRandomBytes;
    let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(random)?;
    let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key.as_ref()))?;
    let public = key.public_key().map(|public| CertificateDer::from(public.as_ref().to_vec()));
    let key = CertifiedKey::new(public.into_iter().collect(), key);
    let provider = Arc::new(provider::default_provider());
    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(key))));
    server.send_tls13_tickets = 0;
    let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyKey(provider)))
        .with_no_client_auth();
    client.resumption = Resumption::disabled();
    client.enable_sni = false;
    Ok(Configs { client: Arc::new(client), server: Arc::new(server) })
}

/// Takes every key, which must have signed the connection's handshake.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(
            message,
            &key,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// What has come is no TLS, or not what the other end sent.
fn altered(error: rustls::Error) -> io::Error {
    let what = match error {
        rustls::Error::DecryptError => "bytes were changed on the way, or are another process's",
        rustls::Error::InvalidMessage(_) => "bytes were changed on the way, or are no TLS",
        _ => "no TLS as this run has it",
    };
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} ({error})"))
}

/// The connection has ended, and the other end has not said so.
fn cut() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "it was cut, without TLS's end; has the process died?")
}

/// A connection over a socket that may or may not block.
#[derive(Debug)]
pub struct TlsStream {
    pub(crate) socket: TcpStream,
    connection: Connection,
}

impl TlsStream {
    /// The visitor's end.
    pub(crate) fn visitor(socket: TcpStream) -> io::Result<TlsStream> {
        // The name is not sent.
        let name = ServerName::from(socket.peer_addr()?.ip());
        let connection = ClientConnection::new(Arc::clone(&configs()?.client), name).map_err(altered)?;
        Ok(TlsStream { socket, connection: connection.into() })
    }

    /// The host's end.
    pub(crate) fn host(socket: TcpStream) -> io::Result<TlsStream> {
        let connection = ServerConnection::new(Arc::clone(&configs()?.server)).map_err(altered)?;
        Ok(TlsStream { socket, connection: connection.into() })
    }

    /// Goes on with TLS's handshake as far as it can without waiting. Returns whether it is complete.
    pub(crate) fn is_open(&mut self) -> io::Result<bool> {
        while self.connection.is_handshaking() || self.connection.wants_write() {
            if self.connection.wants_write() {
                match self.connection.write_tls(&mut self.socket) {
                    Ok(_) => continue,
                    Err(error) if is_pending(&error) => return Ok(false),
                    Err(error) => return Err(error),
                }
            }
            match self.receive() {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if is_pending(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn receive(&mut self) -> io::Result<usize> {
        let read = self.connection.read_tls(&mut self.socket)?;
        self.connection.process_new_packets().map_err(altered)?;
        Ok(read)
    }

    /// A value that only the two ends of this very connection have (RFC 9266, `tls-exporter`).
    pub(crate) fn binding(&self) -> io::Result<[u8; 32]> {
        let binding = self.connection.export_keying_material([0; 32], b"EXPORTER-Channel-Binding", Some(b""));
        binding.map_err(altered)
    }

    /// The halves, for a thread each.
    pub(crate) fn split(self) -> io::Result<(TlsReader, TlsWriter)> {
        let (reading, mut connection) = (self.socket.try_clone()?, self.connection);
        let (mut plain, at, encrypted) = Default::default();
        // The last message of the handshake may have come together with what follows it.
        take_decrypted(&mut connection, &mut plain)?;
        let connection = Arc::new(Mutex::new(connection));
        let writer = TlsWriter { socket: self.socket, connection: Arc::clone(&connection), encrypted };
        let encrypted = vec![0; PIECE];
        Ok((TlsReader { socket: reading, connection, encrypted, plain, at }, writer))
    }
}

impl Read for TlsStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            self.receive()?;
        }
    }
}

impl Write for TlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.connection.writer().write(bytes)?;
        self.flush()?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut self.socket) {
                // The connection has the bytes already: the caller must not write them again.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => drop(done?),
            }
        }
        Ok(())
    }
}

/// Takes what the connection has decrypted. Returns whether nothing follows.
fn take_decrypted(connection: &mut Connection, plain: &mut Vec<u8>) -> io::Result<bool> {
    match connection.reader().read_to_end(plain) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(cut()),
        Err(error) => Err(error),
    }
}

/// The half that reads. While it waits in the socket the other half may use the connection.
#[derive(Debug)]
pub struct TlsReader {
    socket: TcpStream,
    connection: Arc<Mutex<Connection>>,
    encrypted: Vec<u8>,
    /// What is decrypted, and how much of it has been read.
    plain: Vec<u8>,
    at: usize,
}

impl TlsReader {
    /// Decrypts what has come.
    fn decrypt(&mut self, read: usize) -> io::Result<()> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let mut encrypted = &self.encrypted[..read];
        loop {
            let taken = connection.read_tls(&mut encrypted)?;
            connection.process_new_packets().map_err(altered)?;
            let has_ended = take_decrypted(&mut connection, &mut self.plain)?;
            if has_ended || taken == 0 || encrypted.is_empty() {
                return Ok(());
            }
        }
    }
}

impl Read for TlsReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.at == self.plain.len() {
            self.plain.clear();
            self.at = 0;
            let read = self.socket.read(&mut self.encrypted)?;
            self.decrypt(read)?;
            if read == 0 && self.plain.is_empty() {
                return Ok(0);
            }
        }
        let read = (&self.plain[self.at..]).read(bytes)?;
        self.at += read;
        Ok(read)
    }
}

/// The half that writes. While it waits in the socket the other half may use the connection.
#[derive(Debug)]
pub struct TlsWriter {
    socket: TcpStream,
    connection: Arc<Mutex<Connection>>,
    encrypted: Vec<u8>,
}

impl TlsWriter {
    /// Sends what the connection has to send after `act`.
    fn send<T>(&mut self, act: impl FnOnce(&mut Connection) -> io::Result<T>) -> io::Result<T> {
        self.encrypted.clear();
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let done = act(&mut connection)?;
        while connection.wants_write() {
            connection.write_tls(&mut self.encrypted)?;
        }
        drop(connection);
        self.socket.write_all(&self.encrypted)?;
        Ok(done)
    }

    /// Says that nothing follows, so that the other end can tell this from a link that was cut.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.send(|connection| {
            connection.send_close_notify();
            Ok(())
        })?;
        self.socket.shutdown(Shutdown::Write)
    }
}

impl Write for TlsWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(|connection| connection.writer().write(&bytes[..bytes.len().min(PIECE)]))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
