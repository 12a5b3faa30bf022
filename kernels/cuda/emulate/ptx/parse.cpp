// From the text of PTX to instructions. What is not known ends the process, with its place.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "machine.h"
#include "special.h"

namespace emulate::ptx {
namespace {

// Behind all static arrays, which have 48 KiB at most.
constexpr uint32_t DYNAMIC_BEGIN = 128 << 10;

struct Shape {
    const char* operands;
    Execute execute;
    Kind kind;
};

const std::unordered_map<std::string, Shape>& shapes() {
    static const auto all = [] {
        std::unordered_map<std::string, Shape> map;
        for (const auto* forms : {&arithmetic(), &conversions()}) {
            for (const Form& form : *forms) {
                map[form.opcode] = {form.operands, form.execute, Kind::plain};
            }
        }
        for (const auto* forms : {&warp_instructions(), &memory_instructions()}) {
            for (const WarpForm& form : *forms) {
                map[form.opcode] = {form.operands, form.execute, form.kind};
            }
        }
        return map;
    }();
    return all;
}

struct Register {
    // A letter of Form::operands.
    char width;
    uint32_t at;
};
constexpr uint32_t NOWHERE = ~uint32_t{0};

uint32_t bytes_of(char width) {
    return width == 'p' ? 4 : LANES * (width == 'h' ? 2 : width == 'w' ? 4 : 8);
}

class Parser {
   public:
    Parser(std::string file, const std::string& text) : text(text) {
        kernel.file = std::move(file);
    }

    Kernel read() {
        while (next_statement()) {
            statement();
        }
        if (kernel.name.empty() || depth != 0 || kernel.code.empty()) {
            unknown("the end");
        }
        for (const auto& [index, label] : jumps) {
            const auto found = labels.find(label);
            line = kernel.code[index].line;
            if (found == labels.end()) {
                unknown("a label");
            }
            kernel.code[index].target = found->second;
        }
        kernel.register_bytes = (used + 63) / 64 * 64;
        return std::move(kernel);
    }

   private:
    const std::string& text;
    Kernel kernel;
    size_t at = 0;
    uint32_t line = 1;
    uint32_t depth = 0;
    uint32_t used = 0;
    // The statement, and how far it has been read.
    std::string words;
    size_t cursor = 0;
    // Names of registers: declared in ranges, and one by one in blocks, which hide others.
    std::unordered_map<std::string, char> ranges;
    std::unordered_map<std::string, Register> registers;
    std::vector<std::vector<std::pair<std::string, Register>>> hidden;
    std::unordered_map<std::string, uint32_t> constants;
    std::unordered_map<std::string, uint32_t> parameters;
    std::unordered_map<std::string, SharedArray> arrays;
    uint32_t shared_end = SHARED_BEGIN;
    // Products of f32 in this basic block, and their factors.
    const bool fuses = getenv("TUTTI_PTX_FUSE") != nullptr;
    std::map<uint32_t, std::pair<uint32_t, uint32_t>> products;
    std::unordered_map<std::string, uint32_t> labels;
    std::vector<std::pair<size_t, std::string>> jumps;

    [[noreturn]] void unknown(const char* what) {
        fprintf(stderr, "%s:%u: the emulation of PTX does not know %s here: %s\n",
                kernel.file.c_str(), line, what, words.c_str());
        _exit(3);
    }

    // Characters, without comments. `//# FILE LINE` tells where the next line comes from.
    void skip_space() {
        for (;;) {
            while (at < text.size() && isspace(static_cast<unsigned char>(text[at])) != 0) {
                line += text[at++] == '\n' ? 1 : 0;
            }
            if (text.compare(at, 2, "//") != 0) {
                return;
            }
            const size_t end = std::min(text.find('\n', at), text.size());
            if (text.compare(at, 4, "//# ") == 0) {
                const size_t space = text.find(' ', at + 4);
                kernel.file = text.substr(at + 4, space - at - 4);
                line = static_cast<uint32_t>(atoi(text.c_str() + space)) - 1;
            }
            at = end;
        }
    }

    // Up to a semicolon, or what else ends it: the brace of a block, a label's colon, and lines of
    // directives that have no semicolon.
    bool next_statement() {
        skip_space();
        words.clear();
        cursor = 0;
        if (at >= text.size()) {
            return false;
        }
        if (text[at] == '{' || text[at] == '}') {
            words = text[at++];
            return true;
        }
        const bool lines = text[at] == '.' && kernel.name.empty();
        const bool ended_by_line =
            (lines && text.compare(at, 7, ".shared") != 0 && text.compare(at, 7, ".extern") != 0 &&
             text.compare(at, 8, ".visible") != 0) ||
            text.compare(at, 8, ".maxntid") == 0 || text.compare(at, 6, ".minnc") == 0;
        const bool entry = text.compare(at, 8, ".visible") == 0;
        const size_t begin = at;
        while (at < text.size()) {
            const char c = text[at++];
            if (c == ';' || (c == '\n' && ended_by_line) || (c == ')' && entry)) {
                words = text.substr(begin, at - begin - (c == ')' ? 0 : 1));
                // Counted at the end, so that messages have the first line of a statement.
                count_lines = static_cast<uint32_t>(std::count(words.begin(), words.end(), '\n')) +
                              (c == '\n' ? 1 : 0);
                return true;
            }
            if (c == ':' && (at >= text.size() || text[at] != ':') && text[at - 2] != ':') {
                words = text.substr(begin, at - begin);
                return true;
            }
        }
        words = text.substr(begin);
        unknown("a statement without an end");
    }
    uint32_t count_lines = 0;

    void statement() {
        if (words == "{") {
            depth++;
            hidden.emplace_back();
        } else if (words == "}") {
            if (depth == 0) {
                unknown("this brace");
            }
            depth--;
            for (const auto& [name, before] : hidden.back()) {
                registers[name] = before;
            }
            hidden.pop_back();
        } else if (words.back() == ':') {
            words.pop_back();
            products.clear();
            labels[words] = static_cast<uint32_t>(kernel.code.size());
        } else if (words[0] == '.') {
            directive();
        } else {
            instruction();
        }
        line += std::exchange(count_lines, 0);
    }

    void spaces() {
        while (cursor < words.size() &&
               (isspace(static_cast<unsigned char>(words[cursor])) != 0 || words[cursor] == ',')) {
            cursor++;
        }
    }
    // A word: up to a space or what punctuates operands.
    std::string word() {
        spaces();
        const size_t begin = cursor;
        while (cursor < words.size() && isspace(static_cast<unsigned char>(words[cursor])) == 0 &&
               strchr(",|{}[]()+<>", words[cursor]) == nullptr) {
            cursor++;
        }
        return words.substr(begin, cursor - begin);
    }
    void expect(char c) {
        spaces();
        if (cursor >= words.size() || words[cursor++] != c) {
            unknown("these operands");
        }
    }
    bool next_is(char c) {
        spaces();
        return cursor < words.size() && words[cursor] == c;
    }

    void directive() {
        const std::string name = word();
        if (name == ".version" || name == ".address_size" || name == ".minnctapersm") {
            return;
        }
        if (name == ".target") {
            kernel.waits = atoi(word().c_str() + strlen("sm_")) >= 90;
        } else if (name == ".maxntid") {
            kernel.most_threads = static_cast<uint32_t>(atoi(word().c_str()));
        } else if (name == ".pragma") {
            // What the assembler may unroll, and which bytes of a load count.
            if (words.find("nounroll") == std::string::npos &&
                words.find("used_bytes_mask") == std::string::npos) {
                unknown("this pragma");
            }
        } else if (name == ".visible") {
            entry();
        } else if (name == ".reg") {
            const std::string type = word();
            const char width = type == ".pred"                      ? 'p'
                               : type == ".b16"                     ? 'h'
                               : type == ".b32" || type == ".f32"   ? 'w'
                               : type == ".b64" || type == ".f64"   ? 'q'
                                                                    : ' ';
            if (width == ' ') {
                unknown("this type");
            }
            const std::string reg = word();
            if (next_is('<')) {
                ranges[reg] = width;
            } else {
                const auto found = registers.find(reg);
                const Register before = found != registers.end() ? found->second : Register{' ', 0};
                hidden.back().emplace_back(reg, before);
                registers[reg] = {width, NOWHERE};
            }
        } else if (name == ".shared" || name == ".extern") {
            const bool dynamic = name == ".extern";
            if (dynamic && word() != ".shared") {
                unknown("this declaration");
            }
            if (word() != ".align" || atoi(word().c_str()) > 16 || word() != ".b8") {
                unknown("this declaration");
            }
            const std::string array = word();
            expect('[');
            const auto bytes = static_cast<uint32_t>(atoi(word().c_str()));
            if ((bytes == 0) != dynamic) {
                unknown("this size");
            }
            arrays[array] = {array, 0, bytes, dynamic};
        } else {
            unknown("this directive");
        }
    }

    void entry() {
        if (word() != ".entry" || !kernel.name.empty()) {
            unknown("this declaration");
        }
        kernel.name = word();
        expect('(');
        while (!next_is(')')) {
            if (word() != ".param") {
                unknown("a parameter");
            }
            const std::string type = word();
            if (type != ".u64" && type != ".u32" && type != ".f32") {
                unknown("a parameter");
            }
            parameters[word()] = kernel.parameters++;
        }
    }

    uint32_t new_row(char width) {
        const uint32_t bytes = bytes_of(width);
        used = (used + bytes - 1) / bytes * bytes;
        return std::exchange(used, used + bytes);
    }

    uint32_t row_of(const std::string& name, char width) {
        auto found = registers.find(name);
        if (found == registers.end() || found->second.width == ' ') {
            const std::string range = name.substr(0, name.find_first_of("0123456789"));
            const auto declared = ranges.find(range);
            if (declared == ranges.end()) {
                unknown("a register");
            }
            registers[name] = {declared->second, NOWHERE};
            found = registers.find(name);
        }
        if (found->second.width != width) {
            unknown("a register of this width");
        }
        if (found->second.at == NOWHERE) {
            found->second.at = new_row(width);
        }
        return found->second.at;
    }

    uint32_t constant_row(uint64_t value, char width) {
        const std::string key = width + std::to_string(value);
        const auto found = constants.find(key);
        if (found != constants.end()) {
            return found->second;
        }
        const uint32_t row = new_row(width);
        std::vector<uint8_t> bytes(bytes_of(width));
        const size_t size = width == 'p' ? 4 : bytes.size() / LANES;
        for (size_t i = 0; i < bytes.size(); i++) {
            bytes[i] = static_cast<uint8_t>(value >> (8 * (i % size)));
        }
        kernel.constants.emplace_back(row, std::move(bytes));
        constants[key] = row;
        return row;
    }

    uint64_t number(const std::string& name) {
        char* end = nullptr;
        uint64_t value;
        if (name[0] == '0' && (name[1] == 'f' || name[1] == 'd')) {
            value = strtoull(name.c_str() + 2, &end, 16);
        } else if (name[0] == '-') {
            value = static_cast<uint64_t>(strtoll(name.c_str(), &end, 0));
        } else {
            value = strtoull(name.c_str(), &end, 0);
        }
        if (name.empty() || *end != '\0') {
            unknown("an operand");
        }
        return value;
    }

    // An array that a kernel mentions is one of its own from then on.
    bool address_of(const std::string& name, uint64_t* address) {
        const auto found = arrays.find(name);
        if (found == arrays.end()) {
            return false;
        }
        SharedArray& array = found->second;
        if (array.begin == 0) {
            array.begin = array.dynamic ? DYNAMIC_BEGIN : shared_end;
            if (!array.dynamic) {
                shared_end = (shared_end + array.bytes + 15) / 16 * 16 + SHARED_GAP;
            }
            if (shared_end > DYNAMIC_BEGIN) {
                unknown("so much shared memory");
            }
            kernel.shared.push_back(array);
        }
        *address = array.begin;
        return true;
    }

    uint32_t operand(char width, bool is_written) {
        const std::string name = word();
        if (name[0] == '%') {
            return row_of(name, width);
        }
        if (is_written) {
            unknown("a result that is no register");
        }
        uint64_t value;
        if (!address_of(name, &value)) {
            value = number(name);
        }
        return constant_row(width == 'p' ? (value != 0 ? ALL : 0) : value, width);
    }

    // [register], [register+offset], [array+offset]
    uint32_t address(char width, int64_t* offset) {
        expect('[');
        const std::string name = word();
        uint32_t row;
        uint64_t value;
        if (name[0] == '%') {
            row = row_of(name, width);
        } else if (width == 'w' && address_of(name, &value)) {
            row = constant_row(value, width);
        } else {
            unknown("this address");
        }
        *offset = 0;
        if (next_is('+')) {
            cursor++;
            *offset = static_cast<int64_t>(number(word()));
        }
        expect(']');
        return row;
    }

    void operands(Instruction& i, const char* letters) {
        size_t count = 0;
        for (const char* letter = letters; *letter != '\0'; letter++) {
            switch (*letter) {
                case 'w':
                case 'q':
                case 'h':
                case 'p':
                    // The first is the result, but for what has an address first.
                    i.at[count] = operand(*letter, letter == letters && letter[1] != '\0');
                    count++;
                    break;
                case 'm':
                    i.mask_at = operand('w', false);
                    break;
                case 'a':
                    i.at[ADDRESS] = address('w', &i.immediate);
                    break;
                case 'A':
                    i.at[ADDRESS] = address('q', &i.immediate);
                    break;
                case 'G': {
                    int64_t offset;
                    i.at[FROM] = address('q', &offset);
                    if (offset != 0) {
                        unknown("an offset");
                    }
                    break;
                }
                default:
                    expect(*letter);
            }
        }
    }

    // The letter of the first register that is named from here on.
    char width_ahead() {
        const size_t begin = words.find('%', cursor);
        if (begin == std::string::npos) {
            return ' ';
        }
        const size_t end = words.find_first_of(",}] \t;", begin);
        const std::string name = words.substr(begin, end - begin);
        const auto found = registers.find(name);
        if (found != registers.end() && found->second.width != ' ') {
            return found->second.width;
        }
        const auto range = ranges.find(name.substr(0, name.find_first_of("0123456789")));
        return range != ranges.end() ? range->second : ' ';
    }

    void instruction() {
        Instruction i;
        i.line = line;
        i.guard = ALWAYS;
        std::string opcode = word();
        if (opcode[0] == '@') {
            i.negated = opcode[1] == '!';
            i.guard = row_of(opcode.substr(i.negated ? 2 : 1), 'p');
            opcode = word();
            if (opcode != "bra") {
                unknown("a predicate");
            }
        }
        if (opcode == "bra" || opcode == "bra.uni") {
            i.kind = Kind::branch;
            jumps.emplace_back(kernel.code.size(), word());
        } else if (opcode == "ret") {
            i.kind = Kind::exit;
        } else if (opcode == "bar.sync" || opcode == "bar.red.and.pred") {
            i.kind = Kind::barrier;
            if (opcode == "bar.red.and.pred") {
                i.elements = 2;
                i.at[0] = operand('p', true);
            }
            if (word() != "0") {
                unknown("another barrier");
            }
            if (i.elements == 2) {
                i.at[1] = operand('p', false);
            }
        } else if (opcode.compare(0, 9, "ld.param.") == 0) {
            const char width = width_ahead();
            i.at[0] = operand(width, true);
            expect('[');
            const auto found = parameters.find(word());
            if (found == parameters.end()) {
                unknown("a parameter");
            }
            expect(']');
            i.immediate = found->second;
            i.execute = parameter(opcode.c_str() + 9, width);
        } else if (opcode.compare(0, 3, "ld.") == 0 || opcode.compare(0, 3, "st.") == 0) {
            access(i, opcode);
        } else {
            other(i, opcode);
        }
        spaces();
        if (cursor != words.size() ||
            (i.execute == nullptr && i.kind != Kind::branch && i.kind != Kind::exit &&
             i.kind != Kind::barrier)) {
            unknown("this instruction");
        }
        i.opcode = name_of(opcode);
        if (fuses) {
            fuse(i, opcode);
        }
        kernel.code.push_back(i);
    }

    // An assembler may make one operation of a product and a sum without .rn, whatever else becomes
    // of the product. `TUTTI_PTX_FUSE`: all of them, in each basic block.
    void fuse(Instruction& i, const std::string& opcode) {
        const bool sub = opcode == "sub.f32";
        if (opcode == "add.f32" || sub) {
            const auto first = products.find(i.at[1]), second = products.find(i.at[2]);
            if (first != products.end()) {
                i = fused(i, sub ? "fused.sub" : "fused.add", first->second, i.at[2]);
            } else if (second != products.end()) {
                i = fused(i, sub ? "fused.negated" : "fused.add", second->second, i.at[1]);
            }
        }
        // What is written is no product any more, and no factor of one.
        const bool several = i.kind == Kind::warp || i.kind == Kind::whole_warp ||
                             opcode == "mov.b64";
        const size_t results = several ? 4 : i.elements;
        for (auto product = products.begin(); product != products.end();) {
            const auto [a, b] = product->second;
            bool stale = false;
            for (size_t r = 0; r < results; r++) {
                stale = stale || product->first == i.at[r] || a == i.at[r] || b == i.at[r];
            }
            product = stale ? products.erase(product) : std::next(product);
        }
        if (opcode == "mul.f32" && i.at[0] != i.at[1] && i.at[0] != i.at[2]) {
            products[i.at[0]] = {i.at[1], i.at[2]};
        }
    }
    Instruction fused(Instruction i, const char* opcode, std::pair<uint32_t, uint32_t> product,
                      uint32_t term) {
        i.at[1] = product.first;
        i.at[2] = product.second;
        i.at[3] = term;
        i.execute = shapes().at(opcode).execute;
        return i;
    }

    void access(Instruction& i, const std::string& opcode) {
        // Of a store the registers are behind the address.
        const bool store = opcode[0] == 's';
        const size_t begin = cursor;
        cursor = store ? words.find(']') : cursor;
        char width = width_ahead();
        // A constant is stored: as wide as the access.
        if (width == ' ') {
            width = opcode.back() == '4' ? 'q' : opcode.back() == '2' ? 'w' : 'h';
        }
        cursor = begin;
        const AccessForm form = access_named(opcode, width);
        i.execute = form.execute;
        i.kind = form.kind;
        i.elements = form.elements;
        i.flags = form.flags;
        if (form.execute == nullptr) {
            unknown("this access");
        }
        if (store) {
            i.at[ADDRESS] = address(form.width, &i.immediate);
        }
        if (form.elements > 1) {
            expect('{');
        }
        for (size_t e = 0; e < form.elements; e++) {
            i.at[e] = operand(width, !store);
        }
        if (form.elements > 1) {
            expect('}');
        }
        if (!store) {
            i.at[ADDRESS] = address(form.width, &i.immediate);
        }
    }

    void other(Instruction& i, const std::string& opcode) {
        std::string key = opcode;
        if (opcode.compare(0, 4, "mov.") == 0) {
            // What has a name of its own, and halves in braces.
            const size_t source = words.find('%', words.find(',', cursor));
            if (next_is('{')) {
                key += ".unpack";
            } else if (words.find('{', cursor) != std::string::npos) {
                key += ".pack";
            } else if (source != std::string::npos) {
                const Execute execute = special_register(opcode, words.substr(source));
                if (execute != nullptr) {
                    i.at[0] = operand(opcode == "mov.u64" ? 'q' : 'w', true);
                    word();
                    i.execute = execute;
                    i.kind = opcode == "mov.u64" ? Kind::yielding : Kind::plain;
                    return;
                }
            }
        }
        const auto found = shapes().find(key);
        if (found == shapes().end()) {
            unknown("this instruction");
        }
        i.execute = found->second.execute;
        i.kind = found->second.kind;
        i.mask_at = i.kind == Kind::whole_warp ? constant_row(ALL, 'w') : 0;
        operands(i, found->second.operands);
    }

    // Names that outlive the text.
    static const char* name_of(const std::string& opcode) {
        static std::map<std::string, bool> names;
        return names.emplace(opcode, true).first->first.c_str();
    }
};

}  // namespace

Kernel parse(const std::string& file, const std::string& text) { return Parser(file, text).read(); }

const Kernel& load(const char* name) {
    static std::map<std::string, Kernel> kernels;
    const auto found = kernels.find(name);
    if (found != kernels.end()) {
        return found->second;
    }
    const std::string path = std::string(folder) + "/" + name + ".ptx";
    FILE* file = fopen(path.c_str(), "rb");
    if (file == nullptr) {
        fprintf(stderr, "%s: no such file\n", path.c_str());
        _exit(3);
    }
    std::string text;
    char part[1 << 16];
    for (size_t bytes; (bytes = fread(part, 1, sizeof part, file)) > 0;) {
        text.append(part, bytes);
    }
    fclose(file);
    return kernels.emplace(name, parse(path, text)).first->second;
}

}  // namespace emulate::ptx
