#!/usr/bin/env bash
# Runs a command on the first of two emulated hosts, h1 and h2, with a link of a chosen rate between them.
#
#   bash run_scripts/two_hosts.sh RATE COMMAND [ARGUMENT...]
#
#   bash run_scripts/two_hosts.sh 1gbit bash run_scripts/hosts_mpirun.sh h1:1,h2:1 train.py
#   bash run_scripts/two_hosts.sh 100mbit bash run_scripts/hosts_horovodrun.sh h1:2,h2:2 train.py
#
# RATE is that of each direction, as tc writes it (1gbit, 100mbit), or `unlimited`. The hosts share processor, memory and files with
# this machine, and have network and names of their own: each has lo and eth0 (10.9.0.1 and 10.9.0.2), and ssh leads from one
# to the other. Needs root, and a kernel with network namespaces (for a rate also the queueing discipline tbf); a container
# needs the capability SYS_ADMIN. The exit code is the command's. The hosts are gone with all their processes when it ends,
# or when this script is killed.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NETWORK=10.9.0

# Runs a command as root on host h2; it ends with the hosts.
on_h2() { nsenter --target "$H2" --net --uts -- "$@"; }

# Runs a part of the preparation; where it fails, says what failed.
prepare() {
  local problem
  problem=$("$@" 2>&1) || die "two hosts cannot be emulated here: $*: $problem"
}

# In namespaces of its own, this is h1. $1 is a folder for what the hosts need, $2 the rate, the rest the command.
be_the_hosts() {
  local folder=$1 rate=$2 host
  shift 2
  coproc ANSWERS { exec unshare --net --uts sh -c 'hostname h2 && echo ready && exec sleep infinity' 2>&1; }
  H2=$ANSWERS_PID
  local answer
  read -r answer <&"${ANSWERS[0]}"
  [[ $answer == ready ]] || die "two hosts cannot be emulated here: $answer"

  prepare hostname h1
  prepare ip link add eth0 type veth peer name eth0 netns "$H2"
  prepare ip address add "$NETWORK.1/24" dev eth0
  prepare on_h2 ip address add "$NETWORK.2/24" dev eth0
  for host in env on_h2; do
    prepare "$host" ip link set lo up
    prepare "$host" ip link set eth0 up
    if [[ $rate != unlimited ]]; then
      prepare "$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 50ms
    fi
  done

  printf '%s\n' '127.0.0.1 localhost' "$NETWORK.1 h1" "$NETWORK.2 h2" >"$folder/hosts"
  prepare mount --bind "$folder/hosts" /etc/hosts
  # As the real one, ssh leaves the environment behind, and takes options before and after the host.
  cat >"$folder/ssh" <<EOF
#!/bin/sh
host=
while :; do
  case \$1 in
    -o | -p | -i | -l) shift 2 ;;
    -*) shift ;;
    *) [ -z "\$host" ] || break; host=\${1#*@}; shift ;;
  esac
done
case \$host in
  h1 | $NETWORK.1) process=1 ;;
  h2 | $NETWORK.2) process=$H2 ;;
  *) echo "ssh: Could not resolve hostname \$host: there are h1 and h2" >&2; exit 255 ;;
esac
cd / && exec env -i HOME="\$HOME" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
  nsenter --target \$process --net --uts -- sh -c "\$*"
EOF
  chmod +x "$folder/ssh"
  PATH=$folder:$PATH "$@"
}

main() {
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage_of "${BASH_SOURCE[0]}"
    exit 0
  fi
  if (($# < 2)); then
    usage_of "${BASH_SOURCE[0]}" >&2
    exit 2
  fi
  [[ $1 == unlimited || $1 =~ ^[0-9.]+([kmgt]?(bit|bps))?$ ]] ||
    die "RATE is 1gbit, 100mbit or the like, or unlimited. Received: $1"
  ((EUID == 0)) || die 'two hosts are emulated by network namespaces, which are for root'
  local tool
  for tool in ip tc unshare nsenter hostname mount; do
    command -v "$tool" >/dev/null || die "two hosts cannot be emulated here: there is no $tool (Debian: iproute2, util-linux)"
  done

  # All runs as the first process of a process namespace: when that ends, the kernel ends the others, and the network goes.
  FOLDER=$(mktemp -d)
  trap 'rm -rf "$FOLDER"' EXIT
  # What runs in the background would ignore INT and QUIT.
  setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc --uts --net \
    env --default-signal=INT,QUIT bash "$SCRIPTS/two_hosts.sh" --inside "$FOLDER" "$@" <&0 &
  local inside=$! signal
  for signal in HUP INT TERM; do
    trap 'kill -KILL '"$inside"'; exit $((128 + $(kill -l '"$signal"')))' "$signal"
  done
  wait "$inside"
}

if [[ ${1:-} == --inside ]]; then
  be_the_hosts "${@:2}"
else
  main "$@"
fi
