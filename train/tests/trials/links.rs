//! Faults of the connection of two ranks. It is reached by descriptors of the two processes, which their parent may duplicate.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The ends of the connection between two processes, first that of the first; `None` if there is none.
fn ends(processes: [u32; 2]) -> io::Result<Option<[TcpStream; 2]>> {
    // A line has a number, the end's own address, the other's, the state (01: connected), .., and the socket's inode.
    let table = fs::read_to_string("/proc/net/tcp")?;
    let sockets: Vec<[&str; 3]> = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|words| words.len() > 9 && words[3] == "01")
        .map(|words| [words[1], words[2], words[9]])
        .collect();
    let [first, second] = [inodes(processes[0])?, inodes(processes[1])?];
    for [own, other, inode] in sockets.iter().filter(|socket| first.contains(socket[2])) {
        let is_other_end = |end: &&[&str; 3]| [end[1], end[0]] == [*own, *other] && second.contains(end[2]);
        if let Some(end) = sockets.iter().find(is_other_end) {
            return Ok(Some([duplicate(processes[0], inode)?, duplicate(processes[1], end[2])?]));
        }
    }
    Ok(None)
}

/// A process's descriptors of sockets, by the sockets' inodes.
fn descriptors(process: u32) -> io::Result<Vec<(i32, String)>> {
    let entries = fs::read_dir(format!("/proc/{process}/fd"))?.flatten();
    let socket = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_string();
        Some((entry.file_name().to_str()?.parse().ok()?, inode))
    };
    Ok(entries.filter_map(socket).collect())
}

fn inodes(process: u32) -> io::Result<HashSet<String>> {
    Ok(descriptors(process)?.into_iter().map(|(_, inode)| inode).collect())
}

/// A descriptor, of this process, of a child's socket.
fn duplicate(process: u32, inode: &str) -> io::Result<TcpStream> {
    let found = descriptors(process)?.into_iter().find(|(_, of)| of == inode);
    let (target, _) = found.ok_or(io::ErrorKind::NotFound)?;
    let opened = |fd: libc::c_long| match fd {
        // SAFETY: the system call returned a new descriptor, which this value alone owns.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) }),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the calls take numbers, touch no memory of this process, and return a new descriptor or -1.
    let process = opened(unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) })?;
    // SAFETY: as above.
    let socket = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), target, 0) };
    opened(socket).map(TcpStream::from)
}

/// Shuts the connection down. Returns whether there was one.
pub fn cut(processes: [u32; 2]) -> io::Result<bool> {
    let Some([end, _]) = ends(processes)? else { return Ok(false) };
    end.shutdown(Shutdown::Both)?;
    Ok(true)
}

/// Lets the first process, or both, receive nothing more: neither data, nor that it has arrived, nor that the connection was closed. Returns
/// whether there was a connection.
pub fn deafen(processes: [u32; 2], both: bool) -> io::Result<bool> {
    let Some(ends) = ends(processes)? else { return Ok(false) };
    for end in &ends[..if both { 2 } else { 1 }] {
        // A program of one instruction: "keep 0 bytes of the packet".
        let mut instruction =
            libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut instruction };
        let size = size_of::<libc::sock_fprog>() as libc::socklen_t;
        let (level, option) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
        // SAFETY: the option wants a `sock_fprog` of this size that points to `len` instructions; both live until the call returns, and the
        // system keeps a copy.
        let set =
            unsafe { libc::setsockopt(end.as_raw_fd(), level, option, (&raw const program).cast(), size) };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(true)
}
